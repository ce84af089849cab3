"""What trainers of both libraries have in common: the script that built one, and the metrics of its local epochs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fl_tasks.data.samples import Samples
from fl_tasks.errors import TaskError
from fl_tasks.metrics import wrong_name
from fl_tasks.own_loop import MAX_METRICS, TrainContext, TrainReport

SEEDS = 2**32
"""NumPy's generator, which both libraries seed too, takes smaller seeds only."""


class Script(ABC):
    """What a script's function built, with the library that trains it."""

    train_samples: Samples
    held_out: Samples | None

    @abstractmethod
    def take_model(self) -> nn.Module:
        """The model that the script built. It is not kept: rounds write into a module that nobody else holds."""

    @abstractmethod
    def fit(self, model: nn.Module, dataset: Any, context: TrainContext) -> TrainReport:
        """Train the model in place on a data set. Raises TaskError if what was built cannot train in rounds."""


def check_device(device: torch.device, trains_on: torch.device) -> None:
    """Raises TaskError if a trainer would train on another device than this client's."""
    if device.type != trains_on.type:
        raise TaskError(
            f"expected the script's trainer to train on {device.type}, the device in this client's settings, got"
            f" {trains_on.type}: give both the same"
        )


def epochs_of(logged: Iterable[tuple[float, Mapping[str, Any]]], loss: float | None) -> list[dict[str, float]]:
    """What a trainer logged, as the metrics of local epochs: of each name the mean over an epoch.

    logged: (epochs done, values by name). Values that are no numbers, and names that a metric may not have, are left
    out. loss: of the whole training, for trainers that logged none; with it all values are of one epoch.
    """
    by_epoch: dict[int, dict[str, list[float]]] = {}
    for done, values in logged:
        epoch = by_epoch.setdefault(max(0, math.ceil(done) - 1), {})
        for name, value in values.items():
            if isinstance(value, int | float) and wrong_name(name) is None:
                epoch.setdefault(name, []).append(float(value))
    epochs = [{name: sum(it) / len(it) for name, it in by_epoch[number].items()} for number in sorted(by_epoch)]
    if loss is not None and not all("loss" in epoch for epoch in epochs or [{}]):
        epochs = [{name: value for epoch in epochs for name, value in epoch.items()} | {"loss": loss}]
    return [dict(list(epoch.items())[:MAX_METRICS]) for epoch in epochs]
