"""What the processes under test learn: a model of a few numbers, data made from a formula, faults on demand."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from tasks import Classifier, Examples, Shard

TRAIN, HELD_OUT, FEATURES, CLASSES = 192, 64, 4, 3
FROZEN_ROWS = 1 << 16
"""Rows of four in the frozen table: 2 MiB in float64, much more than all that is trained."""


def plain() -> nn.Module:
    """Two layers, 43 numbers."""
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def batchnorm() -> nn.Module:
    """Floating buffers and an integer one."""
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES))


def wide() -> nn.Module:
    """The names of `plain`, but other shapes."""
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES))


def broad() -> nn.Module:
    """65 539 numbers: several chunks of the smallest size that a coordinator takes."""
    return nn.Sequential(nn.Linear(FEATURES, 1 << 13), nn.ReLU(), nn.Linear(1 << 13, CLASSES))


def frozen() -> nn.Module:
    """A table that nobody trains under two layers that are trained."""
    return FrozenTable()


class FrozenTable(nn.Module):
    """The mean of a frozen table is added to the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(FROZEN_ROWS, FEATURES, dtype=torch.float64), requires_grad=False)
        self.trained = plain()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.trained(inputs + self.table.mean(dim=0).float())


MODELS = {"plain": plain, "batchnorm": batchnorm, "wide": wide, "broad": broad, "frozen": frozen}


class Tiny(Classifier):
    """Which of three directions a point lies in.

    model: a key of MODELS. fails: "loss" or "metrics" raises. hold: while this file is there, a training step waits.
    kept: examples of each shard that a device keeps from training. hold_evaluation: as hold, of an evaluation.
    hold_model: as hold, of making the model.
    step_s: what a slow device needs for a training step.
    """

    def __init__(
        self,
        model: str = "plain",
        fails: str = "",
        hold: str = "",
        kept: int = 0,
        hold_evaluation: str = "",
        hold_model: str = "",
        step_s: float = 0.0,
    ) -> None:
        self._make, self._fails, self._kept, self._step_s = MODELS[model], fails, kept, step_s
        files = (hold, hold_evaluation, hold_model)
        self._hold, self._hold_evaluation, self._hold_model = (Path(file or "/nonexistent") for file in files)

    def model(self) -> nn.Module:
        while self._hold_model.exists():
            time.sleep(0.005)
        return self._make()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self._fails == "loss":
            raise RuntimeError("the sensor is unplugged")
        time.sleep(self._step_s)
        while self._hold.exists():
            time.sleep(0.005)
        return super().loss(output, target)

    def train_data(self, shard: Shard) -> Examples:
        return shard.of(_points(0, TRAIN))[self._kept :]

    def eval_data(self, shard: Shard | None = None) -> Examples:
        return _points(TRAIN, HELD_OUT) if shard is None else shard.of(_points(0, TRAIN))[: self._kept]

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        if self._fails == "metrics":
            raise RuntimeError("the ruler is broken")
        while self._hold_evaluation.exists():
            time.sleep(0.005)
        return dict(super().metrics(output, target))


def _points(start: int, count: int) -> Examples:
    """Points on waves of different lengths, and the class that a fixed rule gives them."""
    at = torch.arange(start, start + count, dtype=torch.float32).unsqueeze(1)
    inputs = torch.sin(at * torch.tensor([0.7, 1.3, 2.9, 4.1]))
    return Examples(inputs, inputs[:, :CLASSES].argmax(dim=1))
