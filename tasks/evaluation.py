"""Evaluation of a model: the task's metrics, averaged over examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from algorithms.batches import Batch, Forward, examples_of, to_device
from tasks.base import Task
from tasks.batches import ordered_batches
from tasks.data.forms import Data, TaskData, as_data, forward_of
from tasks.errors import TaskError, task_code
from tasks.metrics import checked_names

CPU_BATCH, DEVICE_BATCH = 128, 512
"""Examples of a batch. On a CPU the activations of larger batches leave the caches, and blocks over 32 MiB are mapped
anew by every layer. Other devices need large batches."""


def batch_size_on(device: torch.device) -> int:
    """Examples of a batch that are fast on this device."""
    return CPU_BATCH if device.type == "cpu" else DEVICE_BATCH


class EvaluationLeft(TaskError):
    """The evaluation was ended before it had a result. Its text says why."""


class BatchSums(NamedTuple):
    """The metrics of one batch."""

    sums: Mapping[str, Tensor | float]
    """The sum of each metric over the examples, in float64."""
    examples: int


def evaluate(task: Task, model: nn.Module, data: TaskData, batch_size: int | None = None) -> dict[str, float]:
    """Mean of every metric over `data`, summed in float64, on the model's device.

    batch_size: None: CPU_BATCH or DEVICE_BATCH, by the model's device.
    The model stays unchanged, including its training modes. Raises TaskError for no examples, if the metrics are not
    one value for each example under the same names in every batch, and if batches of the task's own have another
    number of examples than it states.
    """
    data = as_data(data)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batches = batches_of(data, batch_size or batch_size_on(device))
    return mean_of(sums_of_batches(task, model, batches), len(data))


def batches_of(data: Data, batch_size: int) -> Iterator[Batch]:
    """The batches of an evaluation, in order. Raises TaskError for no examples."""
    if not len(data):
        raise TaskError("expected at least one example to evaluate on, got none")
    return ordered_batches(data, batch_size)


def sums_of_batches(task: Task, model: nn.Module, batches: Iterable[Batch]) -> Iterator[BatchSums]:
    """The metrics of batches, one after the other. Raises TaskError as `evaluate` does.

    No batch depends on another one, so several processes can share an evaluation.
    """
    device, forward = next((p.device for p in model.parameters()), None), forward_of(task)
    with _evaluation_mode(model), torch.no_grad():
        for raw in batches:
            batch = raw if device is None else to_device(raw, device)
            values = _metrics(task, forward, model, batch)
            yield BatchSums({name: value.double().sum() for name, value in values.items()}, examples_of(batch))


def mean_of(batches: Iterable[BatchSums], examples: int) -> dict[str, float]:
    """Mean of every metric, added up batch by batch. examples: of the whole data. Raises TaskError as `evaluate`."""
    totals, count = dict[str, Tensor | float](), 0
    for sums, size in batches:
        if totals and set(sums) != set(totals):
            raise TaskError(f"expected the metrics {sorted(totals)} of every batch, got {sorted(sums)}")
        for name, value in sums.items():
            totals[name] = totals.get(name, 0) + value
        count += size
    if count != examples:
        raise TaskError(f"expected {examples} examples to evaluate on, as the task states, got {count}")
    return {name: float(total) / count for name, total in totals.items()}


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    # For each module: a task may keep parts of its model, such as batch norms, in evaluation mode.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _metrics(task: Task, forward: Forward, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
    with task_code("the task's model or metrics"):
        size = examples_of(batch)
        values = task.metrics(*forward(model, batch))
    if not isinstance(values, Mapping):
        raise TaskError(
            'metrics(): expected a dict of names with one value for each example, as in {"loss": ...}, got'
            f" {type(values).__name__}"
        )
    checked_names(list(values), "metrics()")
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.shape != (size,) or value.is_complex():
            raise TaskError(
                f'expected the metric "{name}" as a tensor with one value for each example, shape [{size}], got'
                f" {_came(value)}: leave the averaging to the caller"
            )
    return values


def _came(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"shape {list(value.shape)}" + (" of complex numbers" if value.is_complex() else "")
