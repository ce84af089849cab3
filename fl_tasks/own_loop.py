"""A training loop of a task's own: what it gets, what it returns, and the checks of what it returned.

    def train(self, model, data, context):
        optimizer = torch.optim.Adam(model.parameters(), context.learning_rate)
        for inputs, targets in context.batches():
            optimizer.zero_grad()
            self.loss(model(inputs), targets).backward()
            optimizer.step()
        return TrainReport(steps=context.steps, examples=len(data))

The loop trains `model` in place. What a client sends is the change of the model, so the loop returns no tensors.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from fl_tasks.base import TaskError
from fl_tasks.metrics import wrong_name

MAX_EPOCHS, MAX_METRICS = 100, 16
"""Limits of a report's metrics: epochs, and metrics of an epoch."""
MAX_VALUE = 1e100
"""A larger metric is no measurement."""

Batch = Any
"""A batch, as the task's data yield it."""


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What a training loop did."""

    steps: int
    """K_i, the number of steps of its optimizer; 1 or more."""
    examples: int
    """n_i, the number of different examples trained on; 1 or more. It is the weight of the update."""
    metrics: Sequence[Mapping[str, float]] = field(default=())
    """Means over each local epoch, in order: [{"loss": 0.7, "accuracy": 0.5}, ...]. They may be empty."""


@dataclass(frozen=True, slots=True)
class TrainContext:
    """What a training loop gets besides the model and the data. The loop may ignore all of it but `on_step`."""

    device: torch.device
    """Device of the model."""
    learning_rate: float
    """eta_l of the round."""
    weight_decay: float
    max_gradient_norm: float
    """0: no clipping."""
    batch_size: int
    epochs: int | None
    """Local epochs of the run; None if the run gives a number of steps."""
    steps: int
    """Number of batches of the run's local work."""
    seed: int
    """The seed of this client and round. torch's default generators have been seeded with it."""
    round: int
    direction: Mapping[str, Tensor] | None
    """The tensors that the method sends in addition to the model, such as FedCM's momentum; None without any."""
    batches: Callable[[], Iterator[Batch]]
    """The batches of the run's local work, those of the usual training, on the model's device. A call begins anew."""
    on_step: Callable[[], None]
    """A loop calls it after each step, unless it uses `batches` or `each_epoch`, which call it themselves. It raises
    an exception when the work is not needed any more. The loop must let that exception through."""
    rank: int = 0
    """The number of this process, from 0. What the loop of rank 0 leaves in the model counts."""
    processes: int = 1
    """Processes of this device that run the loop together. With more than one, torch.distributed's default group has
    them, and a loop wraps the model in `torch.nn.parallel.DistributedDataParallel`."""

    def each_epoch(self) -> Iterator[Iterator[Batch]]:
        """The same batches, epoch by epoch. Each epoch must be read to its end. One epoch for a number of steps."""
        batches, size = self.batches(), self.steps // (self.epochs or 1)
        for _ in range(self.epochs or 1):
            yield islice(batches, size)


class OwnLoop(Protocol):
    """The member of a task that has a training loop of its own."""

    def train(self, model: nn.Module, data: Any, context: TrainContext) -> TrainReport:
        """Train the model in place, which holds the values of the round. data: of `train_data`."""
        ...


def own_loop(task: object) -> OwnLoop | None:
    """The task as one with a training loop of its own; None if it has none.

    Raises TaskError if its member `train` takes other arguments.
    """
    train = getattr(task, "train", None)
    if isinstance(task, nn.Module) or not callable(train):
        return None  # a torch module sets its mode by `train`; other tasks may have data of this name
    try:
        inspect.signature(train).bind("model", "data", "context")
    except (TypeError, ValueError) as error:
        raise TaskError(
            "expected the task's member `train` to be a training loop, train(model, data, context), got one with other"
            f" arguments ({error}); give a member for another purpose another name"
        ) from None
    return cast(OwnLoop, task)


def most_steps(num_examples: int, batch_size: int, *, epochs: int | None = None, steps: int | None = None) -> int:
    """The most steps that a loop may report: one for each example of the run's local work."""
    return steps * batch_size if steps is not None else (epochs or 1) * num_examples


def checked_report(report: object, num_examples: int, steps: int) -> TrainReport:
    """The report with plain numbers. Raises TaskError for one that is not valid.

    num_examples: of the client's data. steps: of `most_steps`.
    """
    if not isinstance(report, TrainReport):
        raise TaskError(f"expected the task's train() to return a TrainReport, got {type(report).__name__}")
    _check_count("steps", report.steps, steps, "one for each example of the round's work")
    _check_count("examples", report.examples, num_examples, "all of this client")
    if not isinstance(report.metrics, Sequence) or len(report.metrics) > MAX_EPOCHS:
        came = f"{len(report.metrics)}" if isinstance(report.metrics, Sequence) else type(report.metrics).__name__
        raise TaskError(
            f"TrainReport.metrics: expected a list of at most {MAX_EPOCHS} dicts, one for each epoch, got {came}"
        )
    return TrainReport(int(report.steps), int(report.examples), tuple(map(_checked_epoch, report.metrics)))


def _check_count(name: str, count: object, most: int, meaning: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        raise TaskError(f"TrainReport.{name}: expected a whole number from 1 to {most} ({meaning}), got {count!r}")


def _checked_epoch(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, Mapping) or len(metrics) > MAX_METRICS:
        came = f"{len(metrics)}" if isinstance(metrics, Mapping) else type(metrics).__name__
        raise TaskError(f"TrainReport.metrics: expected a dict of at most {MAX_METRICS} metrics in each, got {came}")
    return {_checked_name(name): _checked_value(name, value) for name, value in metrics.items()}


def _checked_name(name: object) -> str:
    if (rule := wrong_name(name)) is not None or not isinstance(name, str):
        raise TaskError(f"TrainReport.metrics: expected {rule}, got {name!r}")
    return name


def _checked_value(name: str, value: Any) -> float:
    """The number. It may be infinite or NaN, as in a training that diverges."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TaskError(f"TrainReport.metrics: expected {name!r} as a number, got {value!r}") from None
    return math.inf if abs(number) > MAX_VALUE else number
