"""What simulated clients learn in these tests: which of three directions a point lies in."""

from __future__ import annotations

import torch
from torch import nn

from tasks import Classifier, Examples, Shard
from tasks.held_out import split_shard

TRAIN, HELD_OUT = 120, 30


class Points(Classifier):
    """part: share of each shard that is held out for evaluation on clients."""

    held_out = "thirty more points"

    def __init__(self, part: float = 0.0) -> None:
        self._part = part

    def model(self) -> nn.Module:
        return nn.Linear(4, 3)

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
