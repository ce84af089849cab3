"""A task with a known optimum: f_i(y) = mean_j sum_k a_jk (y_k - b_jk)^2 / 2 over a client's examples, in float64.

With shards of equal size the uniform mean of the f_i is minimal where the gradient over all examples is zero, at
y_k = sum_j a_jk b_jk / sum_j a_jk, for every partition of the examples.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from fl_tasks import Examples, Shard

EXAMPLES, SIZE = 24, 3


class Point(nn.Module):
    """y for every input."""

    def __init__(self) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.full((SIZE,), 3.0, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.y.expand(len(inputs), SIZE)


class Quadratic:
    """hold: while this file exists, a training step waits."""

    version = "1"

    def __init__(self, hold: str = "") -> None:
        self._hold = Path(hold or "/nonexistent")

    def model(self) -> nn.Module:
        return Point()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        while self._hold.exists():
            time.sleep(0.005)
        a, b = target.unbind(dim=1)
        return (a * (output - b) ** 2 / 2).sum(dim=1).mean()

    def train_data(self, shard: Shard) -> Examples:
        return shard.of(_examples())

    def eval_data(self, shard: Shard | None = None) -> Examples:
        examples = _examples()
        return examples[:1] if shard is None else examples[:0]

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Distance to the optimum."""
        a, b = _examples().targets.unbind(dim=1)
        best = (a * b).sum(dim=0) / a.sum(dim=0)
        return {"error": torch.linalg.vector_norm(output - best, dim=1)}

    def train_labels(self) -> Tensor:
        return torch.arange(EXAMPLES) % 2


def _examples() -> Examples:
    """Curvatures from 1 to 3 and centres from -2 to 2, far apart from one example to the next."""
    wave = torch.arange(EXAMPLES * SIZE, dtype=torch.float64).view(EXAMPLES, SIZE)
    a, b = 2 + torch.sin(wave * 1.7), 2 * torch.sin(wave * 0.9 + 1)
    return Examples(torch.zeros(EXAMPLES, 1, dtype=torch.float64), torch.stack([a, b], dim=1))
