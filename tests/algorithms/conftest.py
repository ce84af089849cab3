"""What the algorithm tests share: small least-squares problems whose gradients are known in closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

import algorithms as fl


def half_squares(output: Tensor, target: Tensor) -> Tensor:
    """Mean of half the squared errors."""
    return 0.5 * ((output - target) ** 2).mean()


class Point(nn.Module):
    """A @ y, with the three entries of y in two parameters."""

    def __init__(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> None:
        super().__init__()
        self.head = nn.Parameter(torch.tensor([1.0, -2.0], dtype=dtype, device=device))
        self.tail = nn.Parameter(torch.tensor([[0.5]], dtype=dtype, device=device))

    def forward(self, A: Tensor) -> Tensor:
        """[rows, 3] -> [rows]."""
        return A @ torch.cat([self.head, self.tail.flatten()])


@dataclass(frozen=True)
class Client:
    """f(y) = mean over rows of (A y - b)^2 / 2, trained on all rows in every step."""

    name: str
    A: Tensor
    b: Tensor
    steps: int

    @property
    def info(self) -> fl.UpdateInfo:
        """What the client reports."""
        return fl.UpdateInfo(self.name, len(self.A), self.steps)

    def gradient(self, y: Tensor) -> Tensor:
        """A^T (A y - b) / rows."""
        return self.A.T @ (self.A @ y - self.b) / len(self.A)


def flat(tensors: fl.Tensors) -> Tensor:
    """The three entries of a point as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


@dataclass(frozen=True)
class Federation:
    """Clients of unlike problems, sizes and amounts of work."""

    clients: Sequence[Client]
    x: fl.Tensors = field(default_factory=lambda: fl.read_state(Point()).trainable)
    settings: fl.LocalSettings = field(default_factory=lambda: fl.LocalSettings(learning_rate=0.1))

    def with_steps(self, steps: int) -> Federation:
        """The same problems, K_i = steps for everyone."""
        return replace(self, clients=[replace(client, steps=steps) for client in self.clients])

    def shifted(self, by: Tensor) -> Federation:
        """Every problem and the first model moved by one vector."""
        return replace(
            self,
            clients=[replace(client, b=client.b + client.A @ by) for client in self.clients],
            x={"head": self.x["head"] + by[:2], "tail": self.x["tail"] + by[2]},
        )

    def train(
        self, client: Client, x: fl.Tensors, rule: fl.LocalRule, watch: Callable[[Tensor], object] | None = None
    ) -> fl.LocalResult:
        """One client's round from x; `watch` sees the point after each step."""
        model = Point(x["head"].dtype, str(x["head"].device))
        fl.load_state(model, fl.ModelState(x, {}, {}))
        batches = [(client.A.to(x["head"].dtype), client.b.to(x["head"].dtype))] * client.steps
        seen = (lambda _: watch(flat(fl.read_state(model).trainable))) if watch else None
        return fl.train_locally(model, batches, half_squares, rule, self.settings, on_step=seen)

    def deltas(self, algorithm: fl.Algorithm, state: fl.ServerState) -> list[tuple[fl.UpdateInfo, fl.Tensors]]:
        """The updates of all clients for one state."""
        rule = algorithm.local_rule(algorithm.direction(state))
        return [(client.info, self.train(client, state.x, rule).delta) for client in self.clients]

    def play(self, algorithm: fl.Algorithm, rounds: int, state: fl.ServerState | None = None) -> list[fl.ServerState]:
        """The states after each of some rounds with all clients."""
        states = [state or algorithm.init(self.x)]
        for t in range(rounds):
            updates = self.deltas(algorithm, states[-1])
            states.append(fl.apply_updates(algorithm, states[-1], updates, self.round_info(t)))
        return states[1:]

    def round_info(self, t: int = 0) -> fl.RoundInfo:
        """Round t at the federation's rate."""
        return fl.RoundInfo(t, self.settings.learning_rate)


@pytest.fixture
def federation() -> Federation:
    """Three clients: 2, 4 and 3 rows; 1, 3 and 2 steps."""
    random = torch.Generator().manual_seed(5)

    def client(name: str, rows: int, steps: int) -> Client:
        A, b = torch.randn(rows, 4, generator=random, dtype=torch.float64).split([3, 1], dim=1)
        return Client(name, A, b[:, 0], steps)

    return Federation([client("ada", 2, 1), client("bob", 4, 3), client("cyd", 3, 2)])
