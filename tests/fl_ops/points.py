"""A small task for simulations: classify points by three directions."""

from __future__ import annotations

import torch
from torch import nn

from fl_tasks import Classifier, Examples, Shard
from fl_tasks.data.examples import split_shard

TRAIN, HELD_OUT = 120, 30


class Points(Classifier):
    """A linear classifier. part: share of each shard that is held out for evaluation on clients.

    tied: a model of two layers with one weight.
    """

    held_out = "thirty more points"

    def __init__(self, part: float = 0.0, tied: bool = False) -> None:
        self._part, self._tied = part, tied

    def model(self) -> nn.Module:
        if not self._tied:
            return nn.Linear(4, 3)
        first, second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        second.weight = first.weight
        return nn.Sequential(first, nn.ReLU(), second, nn.Linear(4, 3))

    def train_data(self, shard: Shard) -> Examples:
        return split_shard(shard.of(_points(0, TRAIN)), self._part)[0]

    def train_labels(self) -> torch.Tensor:
        return _points(0, TRAIN).targets

    def eval_data(self, shard: Shard | None = None) -> Examples:
        return _points(TRAIN, HELD_OUT) if shard is None else split_shard(shard.of(_points(0, TRAIN)), self._part)[1]


def _points(start: int, count: int) -> Examples:
    at = torch.arange(start, start + count, dtype=torch.float32).unsqueeze(1)
    inputs = torch.sin(at * torch.tensor([0.7, 1.3, 2.9, 4.1]))
    return Examples(inputs, inputs[:, :3].argmax(dim=1))


class NormedPoints(Points):
    """The same examples, for a model with batch norm and dropout."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))


class _Low(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=torch.bfloat16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs in float32."""
        outputs: torch.Tensor = self.linear(inputs.bfloat16())
        return outputs.float()


class LowPoints(Points):
    """The same examples, for a model of bfloat16."""

    def model(self) -> nn.Module:
        return _Low()


class ReadPoints(Points):
    """Its loss reads a number of a tensor, which vmap cannot do."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().loss(output, target) * (1.0 if output.sum().item() > 0 else 2.0)
