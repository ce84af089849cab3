"""The task of processes under test: a model of a few numbers, data from a formula, faults on demand."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from fl_tasks import Classifier, Examples, Metric, Shard

TRAIN, HELD_OUT, FEATURES, CLASSES = 192, 64, 4, 3
FROZEN_ROWS = 1 << 16
"""Rows of four in the frozen table: 2 MiB in float64, much more than the trained tensors."""


def plain() -> nn.Module:
    """Two layers, 43 numbers."""
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def batchnorm() -> nn.Module:
    """Floating buffers and an integer one."""
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES))


def wide() -> nn.Module:
    """The names of `plain` with other shapes."""
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES))


def broad() -> nn.Module:
    """65 539 numbers: several chunks of the coordinator's smallest chunk size."""
    return nn.Sequential(nn.Linear(FEATURES, 1 << 13), nn.ReLU(), nn.Linear(1 << 13, CLASSES))


def tied() -> nn.Module:
    """A layer that is used twice, with a weight that is also that of another layer."""
    return TiedWeights()


def frozen() -> nn.Module:
    """Two trained layers and a frozen table."""
    return FrozenTable()


class FrozenTable(nn.Module):
    """The mean of a frozen table is added to the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(FROZEN_ROWS, FEATURES, dtype=torch.float64), requires_grad=False)
        self.trained = plain()

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.trained(inputs + self.table.mean(dim=0).float())
        return output


def bfloat16() -> nn.Module:
    """A layer of bfloat16, batch norm, and a layer of float32."""
    return LowPrecision(torch.bfloat16)


def float16() -> nn.Module:
    """As `bfloat16`, with a layer of float16."""
    return LowPrecision(torch.float16)


class LowPrecision(nn.Module):
    """Two layers with batch norm between; the first one has a lower precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5, dtype=dtype)
        self.norm, self.last = nn.BatchNorm1d(5), nn.Linear(5, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        first: Tensor = self.first(inputs.to(self.first.weight.dtype))
        output: Tensor = self.last(self.norm(first.float()).relu())
        return output


def complex_numbers() -> nn.Module:
    """Numbers that no update can carry."""
    return nn.Sequential(nn.Linear(FEATURES, CLASSES, dtype=torch.complex64))


def all_frozen() -> nn.Module:
    """Nothing to train."""
    return plain().requires_grad_(requires_grad=False)


class TiedWeights(nn.Module):
    """One layer under two names, and a third layer with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.again = self.first
        self.third = nn.Linear(FEATURES, FEATURES, bias=False)
        self.third.weight = self.first.weight
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(self.third(self.again(self.first(inputs).relu()).relu()))
        return output


MODELS = {
    "plain": plain,
    "batchnorm": batchnorm,
    "wide": wide,
    "broad": broad,
    "frozen": frozen,
    "tied": tied,
    "bfloat16": bfloat16,
    "float16": float16,
    "complex_numbers": complex_numbers,
    "all_frozen": all_frozen,
}


class Tiny(Classifier):
    """Which of three directions a point lies in.

    model: a key of MODELS. fails: "loss" or "metrics" raises, "sometimes" raises in every fifth loss, "crash" ends the
    process in the loss. loud: a factor of the loss, and so of the update.
    hold: while this file exists, a training step waits.
    kept: examples of each shard that a device keeps from training. hold_evaluation: as hold, for an evaluation.
    hold_model: as hold, for the creation of the model.
    step_s: extra duration of a training step, in seconds.
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
        loud: float = 1.0,
    ) -> None:
        self._losses, self._loud = 0, loud
        self._make, self._fails, self._kept, self._step_s = MODELS[model], fails, kept, step_s
        files = (hold, hold_evaluation, hold_model)
        self._hold, self._hold_evaluation, self._hold_model = (Path(file or "/nonexistent") for file in files)

    def model(self) -> nn.Module:
        while self._hold_model.exists():
            time.sleep(0.005)
        return self._make()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self._losses += 1
        if self._fails == "loss" or (self._fails == "sometimes" and self._losses % 5 == 0):
            raise RuntimeError("the sensor is unplugged")
        if self._fails == "crash":
            os.kill(os.getpid(), signal.SIGKILL)  # as the out-of-memory killer does
        time.sleep(self._step_s)
        while self._hold.exists():
            time.sleep(0.005)
        return self._loud * super().loss(output, target)

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


class TinyWithSums(Tiny):
    """The same, with a metric that is no mean: the share of right answers among all examples."""

    declared_metrics = (
        Metric(
            "share",
            sums=lambda output, target: {
                "right": (output.argmax(dim=1) == target).sum(),
                "all": torch.tensor(len(target)),
            },
            value=lambda sums: sums["right"] / sums["all"],
            lower_is_better=False,
        ),
    )


def _points(start: int, count: int) -> Examples:
    """Points on waves of different lengths, and their classes by a fixed rule."""
    at = torch.arange(start, start + count, dtype=torch.float32).unsqueeze(1)
    inputs = torch.sin(at * torch.tensor([0.7, 1.3, 2.9, 4.1]))
    return Examples(inputs, inputs[:, :CLASSES].argmax(dim=1))
