"""A task that learns nothing: every step adds the same small constant to every parameter.

With it, the cost of a round is that of the system: bytes, disk, sums. Options: `parameters` is the size of the model,
`tensors` the number of its parameter tensors, `largest` the size of the first one; 0: all have about the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_tasks import Examples, Shard

STEP = 2.0**-10
"""Added to every parameter by a step at learning rate 1. A power of two, so that sums are exact."""


class Constant(nn.Module):
    """`tensors` tensors with `parameters` numbers together, initially zero."""

    def __init__(self, parameters: int, tensors: int, largest: int = 0) -> None:
        super().__init__()
        rest, count = parameters - largest, tensors - bool(largest)
        sizes = [largest] * bool(largest) + [rest // count + (index < rest % count) for index in range(count)]
        self.pieces = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])

    def forward(self, inputs: Tensor) -> Tensor:
        """The sum of all parameters, for each input: its gradient is one everywhere."""
        return torch.stack([piece.sum() for piece in self.pieces]).sum().expand(len(inputs))


class ConstantTask:
    """A task with one example, so that an epoch is one step."""

    version = "1"

    def __init__(self, parameters: int = 10_000, tensors: int = 62, largest: int = 0) -> None:
        self._size = (parameters, tensors, largest)

    def model(self) -> nn.Module:
        """The model above."""
        return Constant(*self._size)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Falls by STEP for each unit of each parameter."""
        del target
        return -STEP * output.mean()

    def train_data(self, shard: Shard) -> Examples:
        """One example."""
        del shard
        return Examples(torch.zeros(1, 1), torch.zeros(1))

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """The same example."""
        del shard
        return Examples(torch.zeros(1, 1), torch.zeros(1))

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The sum only: nothing is learned."""
        del target
        return {"sum": output}
