"""A federation in one process: small least-squares problems with gradients in closed form, for tests of methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
        """The facts that the client reports."""
        return fl.UpdateInfo(self.name, len(self.A), self.steps)

    def gradient(self, y: Tensor) -> Tensor:
        """A^T (A y - b) / rows."""
        return self.A.T @ (self.A @ y - self.b) / len(self.A)

    def data(self, like: Tensor) -> fl.LocalData:
        """All rows as one batch, of the given dtype."""
        batch = (self.A.to(like.dtype), self.b.to(like.dtype))
        return fl.LocalData([batch] * self.steps, [batch], half_squares)


def total(tensors: Iterable[Tensor]) -> Tensor:
    """The sum, in order."""
    return functools.reduce(torch.add, tensors)


def flat(tensors: fl.Tensors) -> Tensor:
    """The three entries of a point as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


@dataclass(frozen=True)
class RunState:
    """A run between two rounds: the states of the server and of the clients."""

    server: fl.ServerState
    clients: Mapping[str, fl.Memory] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """The settings of one round."""

    t: int = 0
    cohort: Sequence[int] = (0, 1, 2)
    rate: float | None = None
    """None: the federation's."""
    previous_rate: float | None = None
    arrange: Callable[[list[fl.Update]], list[fl.Update]] = lambda updates: updates
    """Changes the updates before they are summed."""
    clip: Mapping[str, float] = field(default_factory=dict)
    """Clip factors by client."""


UNEVEN = tuple(
    Round(t, cohort, 0.1 * 0.9**t, 0.1 * 0.9 ** (t - 1) if t else None)
    for t, cohort in enumerate(([0, 1, 2], [1], [0, 2], [2, 1], [0], [0, 1, 2]))
)
"""Partial participation, down to one client, and a rate that decays."""


@dataclass(frozen=True)
class Federation:
    """Clients with different problems, sizes and amounts of work."""

    clients: Sequence[Client]
    x: fl.Tensors = field(default_factory=lambda: fl.read_state(Point()).trainable)
    settings: fl.LocalSettings = field(default_factory=lambda: fl.LocalSettings(learning_rate=0.1))
    planned: int = 8
    """T of Demon."""

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

    def model(self, x: fl.Tensors) -> Point:
        """A model that holds x."""
        model = Point(x["head"].dtype, str(x["head"].device))
        fl.load_state(model, fl.ModelState(x, {}, {}))
        return model

    def train(
        self, client: Client, x: fl.Tensors, rule: fl.LocalRule, watch: Callable[[Tensor], object] | None = None
    ) -> fl.LocalResult:
        """One client's round from x; `watch` sees the point after each step."""
        model, data = self.model(x), client.data(x["head"])
        seen = (lambda _: watch(flat(fl.read_state(model).trainable))) if watch else None
        options = fl.LocalOptions(on_step=seen, steps=client.steps)
        return fl.train_locally(model, data.batches, half_squares, rule, self.settings, options)

    def answers(
        self, algorithm: fl.Algorithm, standing: RunState, sums: Mapping[str, fl.Tensors], round: Round
    ) -> dict[str, tuple[fl.ClientContext, fl.ClientUpdate]]:
        """The context and update of each client of the cohort in the exchange after the given sums."""
        number = 0 if not sums else len(algorithm.exchanges) - 1
        direction = algorithm.exchanges[number].direction(standing.server, sums)
        settings = replace(self.settings, learning_rate=round.rate or self.settings.learning_rate)
        x, made = standing.server.as_sent(standing.server.x), {}
        for client in (self.clients[i] for i in round.cohort):
            state = standing.clients.get(client.name) or algorithm.client_init(x)
            omega = fl.omega(algorithm.objective, client.info, self.info(round))
            context = fl.ClientContext(direction, state, omega)
            work = fl.Work(algorithm, context, settings, number)
            made[client.name] = context, fl.answer(self.model(x), client.data(x["head"]), work)
        return made

    def after(self, algorithm: fl.Algorithm, standing: RunState, round: Round) -> RunState:
        """The run after one more round."""
        info = self.info(round)
        sums: dict[str, fl.Tensors] = {}
        for exchange in algorithm.exchanges:
            made = self.answers(algorithm, standing, sums, round)
            updates = [
                (
                    replace(
                        client.info, num_steps=made[client.name][1].steps, clip_factor=round.clip.get(client.name, 1)
                    ),
                    made[client.name][1].payloads,
                )
                for client in (self.clients[i] for i in round.cohort)
            ]
            sums |= fl.sum_exchange(exchange, round.arrange(updates), info)
        kept = {
            name: algorithm.next_client_state(context, update.admitted(round.clip.get(name, 1)))
            for name, (context, update) in made.items()
        }
        return RunState(algorithm.server_step(standing.server, sums, info), {**standing.clients, **kept})

    def start(self, algorithm: fl.Algorithm) -> RunState:
        """The federation before round 0."""
        return RunState(algorithm.init(self.x))

    def run(self, algorithm: fl.Algorithm, rounds: Sequence[Round], start: RunState | None = None) -> list[RunState]:
        """The run after each of some rounds."""
        standings = [start or self.start(algorithm)]
        for round in rounds:
            standings.append(self.after(algorithm, standings[-1], round))
        return standings[1:]

    def play(self, algorithm: fl.Algorithm, rounds: int) -> list[fl.ServerState]:
        """The server's states after each of some rounds with all clients at one rate."""
        return [standing.server for standing in self.run(algorithm, [Round(t) for t in range(rounds)])]

    def deltas(self, algorithm: fl.Algorithm, state: fl.ServerState) -> list[tuple[fl.UpdateInfo, fl.Tensors]]:
        """The deltas of all clients for one state, for a method without client state."""
        rule = algorithm.local_rule(algorithm.direction(state))
        return [(client.info, self.train(client, state.x, rule).delta) for client in self.clients]

    def info(self, round: Round) -> fl.RoundInfo:
        """All facts for a server step."""
        return fl.RoundInfo(
            round.t,
            round.rate or self.settings.learning_rate,
            previous_learning_rate=round.previous_rate,
            rounds=self.planned,
            population=len(self.clients),
            population_examples=sum(len(client.A) for client in self.clients),
            cohort_size=len(round.cohort),
        )

    def round_info(self, t: int = 0) -> fl.RoundInfo:
        """Round t with all clients."""
        return self.info(Round(t))


def parabolas(rate: float = 0.5, x: float = 0.0, **clients: tuple[float, int]) -> Federation:
    """f(y) = (y - b)^2 / 2 of the first entry, for clients given as name=(b, K_i); the other entries stay at 0."""
    return Federation(
        [
            Client(name, torch.tensor([[1.0, 0.0, 0.0]]).double(), torch.tensor([b]).double(), steps)
            for name, (b, steps) in clients.items()
        ],
        {"head": torch.tensor([x, 0.0]).double(), "tail": torch.zeros(1, 1).double()},
        fl.LocalSettings(rate),
        planned=4,
    )


def path(
    federation: Federation, algorithm: fl.Algorithm, rounds: Sequence[Round], *symbols: str
) -> list[tuple[float, ...]]:
    """The first entry of x and of the given parts of the server's memory after each round."""
    return [
        tuple(float(flat(part)[0]) for part in (server.x, *(server.memory[symbol] for symbol in symbols)))
        for server in (standing.server for standing in federation.run(algorithm, rounds))
    ]


def everyone(federation: Federation, rounds: int) -> list[Round]:
    """Rounds with all clients."""
    return [Round(t, range(len(federation.clients))) for t in range(rounds)]


def parts(standing: RunState) -> dict[str, fl.Tensors]:
    """Owner -> all tensors of a run."""
    named = {"x": standing.server.x, **{f"server {symbol}": kept for symbol, kept in standing.server.memory.items()}}
    for client, memory in sorted(standing.clients.items()):
        named |= {f"{client} {symbol}": kept for symbol, kept in memory.items()}
    return named


def same(a: RunState, b: RunState) -> bool:
    """Whether two runs hold the same bits."""
    one, other = parts(a), parts(b)
    return one.keys() == other.keys() and all(
        torch.equal(one[part][name], other[part][name]) for part in one for name in one[part]
    )


def mapped(function: Callable[[fl.Tensors], fl.Tensors], standing: RunState) -> RunState:
    """A run with `function` applied to its named tensors."""
    server = standing.server
    memory = {symbol: function(tensors) for symbol, tensors in server.memory.items()}
    clients = {
        client: {symbol: function(kept) for symbol, kept in own.items()} for client, own in standing.clients.items()
    }
    return RunState(fl.ServerState(function(server.x), memory), clients)


def assert_close(a: RunState, b: RunState) -> None:
    """Equal to 1e-12, all tensors of two runs."""
    torch.testing.assert_close(parts(a), parts(b), rtol=0, atol=1e-12)
