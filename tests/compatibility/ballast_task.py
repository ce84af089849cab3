"""The task of the stored state directories: a quadratic whose bits do not depend on the processor.

All arithmetic is float64 on single examples: no sum depends on the width of a vector register. A buffer of zeros makes
an update three chunks long and compresses to almost nothing.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from fl_tasks import Examples, Shard

EXAMPLES, SIZE, BALLAST = 12, 3, 40_000


class Point(nn.Module):
    """y, for every input."""

    def __init__(self) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.full((SIZE,), 3.0, dtype=torch.float64))
        self.register_buffer("ballast", torch.zeros(BALLAST))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.y.expand(len(inputs), SIZE)


class Ballast:
    """f(y) = sum_k a_k (y_k - b_k)^2 / 2 for each example (a, b).

    hold: while this file exists, a training step waits.
    """

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
        """First coordinate."""
        return {"first": output[:, 0]}

    def train_labels(self) -> Tensor:
        return torch.arange(EXAMPLES) % 2


def _examples() -> Examples:
    """Curvatures a from 1 to 2.75 and centres b from -2 to 2, all exact in binary."""
    at = torch.arange(EXAMPLES * SIZE, dtype=torch.float64).view(EXAMPLES, SIZE)
    a, b = 1 + (at * 3 % 8) / 4, (at * 5 % 17) / 4 - 2
    return Examples(torch.zeros(EXAMPLES, 1, dtype=torch.float64), torch.stack([a, b], dim=1))
