"""Evaluation of a model: the task's metrics, averaged over examples or computed from sums over them.

The running statistics of batch normalisation can be computed anew for the values that a model has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from algorithms.batches import Batch, examples_of, to_device
from algorithms.model_state import evaluation_mode
from fl_tasks.base import Task
from fl_tasks.batches import ordered_batches
from fl_tasks.data.forms import Data, TaskData, as_data, forward_of
from fl_tasks.errors import TaskError, task_code
from fl_tasks.metrics import checked_names
from fl_tasks.summed_metrics import Key, Sums, finite_values_of, summed_metrics, sums_of_batch, values_of

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
    """The sum of each mean metric over the examples, in float64."""
    examples: int
    statistics: Mapping[Key, Tensor | NDArray[np.float64]] = {}
    """The sums of the other metrics, in float64; arrays where they came from another process."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The metrics of all examples of one evaluation, as plain data."""

    examples: int
    means: Mapping[str, float]
    sums: Sums
    """The sums of the metrics that are no mean over examples."""


def evaluate(task: Task, model: nn.Module, data: TaskData, batch_size: int | None = None) -> dict[str, float]:
    """Every metric over `data`, summed in float64, on the model's device. As `totals`, with the values of the sums."""
    return finished(task, totals(task, model, data, batch_size))


def totals(task: Task, model: nn.Module, data: TaskData, batch_size: int | None = None) -> Totals:
    """The means over `data`, and the sums of the metrics that are no means, in float64.

    batch_size: None: CPU_BATCH or DEVICE_BATCH, by the model's device.
    The model stays unchanged, including its training modes. Raises TaskError for no examples, if the metrics are not
    one value for each example under the same names in every batch, and if batches of the task's own have another
    number of examples than it states.
    """
    data = as_data(data)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batches = batches_of(data, batch_size or batch_size_on(device))
    return totals_of(sums_of_batches(task, model, batches), len(data))


def finished(task: Task, totals_: Totals) -> dict[str, float]:
    """The means, and the values of the other metrics. Raises TaskError for a name of both, and for no metric."""
    values = values_of(task, totals_.sums)
    if both := sorted(totals_.means.keys() & values.keys()):
        raise TaskError(f"the metric {both[0]!r}: expected it from metrics() or from declared sums, got it from both")
    metrics = {**totals_.means, **values}
    if not metrics:
        raise TaskError("expected at least one metric from metrics() or with declared sums, got none")
    checked_names(list(metrics), "the task's metrics")
    return metrics


def names_of(task: Task, totals_: Totals) -> list[str]:
    """Names of the metrics. A metric whose sums over few examples have no value has its declared name."""
    values = finite_values_of(task, totals_.sums)
    declared = [metric.name for metric in summed_metrics(task)]
    missing = [
        name for name in declared if not any(measured == name or measured.startswith(f"{name}/") for measured in values)
    ]
    return [*totals_.means, *values, *missing]


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
    summed = summed_metrics(task)
    with evaluation_mode(model), torch.no_grad():
        for raw in batches:
            batch = raw if device is None else to_device(raw, device)
            with task_code("the task's model or metrics"):
                output, target = forward(model, batch)
            values = _metrics(task, output, target, examples_of(batch))
            sums = {name: value.double().sum() for name, value in values.items()}
            yield BatchSums(sums, examples_of(batch), sums_of_batch(summed, output, target))


def totals_of(batches: Iterable[BatchSums], examples: int) -> Totals:
    """The metrics of batches, added up one after the other. examples: of the whole data. Raises TaskError."""
    totals, statistics, count = dict[str, Tensor | float](), dict[Key, Tensor](), 0
    for sums, size, more in batches:
        if totals and set(sums) != set(totals):
            raise TaskError(f"expected the metrics {sorted(totals)} of every batch, got {sorted(sums)}")
        for name, value in sums.items():
            totals[name] = totals.get(name, 0) + value
        if count and {key: statistic.shape for key, statistic in more.items()} != {
            key: statistic.shape for key, statistic in statistics.items()
        }:
            raise TaskError("expected sums of the same names and shapes of every batch, got others")
        for key, statistic in more.items():
            part = torch.as_tensor(statistic)
            statistics[key] = statistics[key] + part if key in statistics else part
        count += size
    if count != examples:
        raise TaskError(f"expected {examples} examples to evaluate on, as the task states, got {count}")
    # One transfer for all, because each waits for the device.
    read = torch.stack([torch.as_tensor(total, dtype=torch.float64) for total in totals.values()] or [torch.zeros(0)])
    means = {name: total / count for name, total in zip(totals, read.tolist(), strict=False)}
    return Totals(count, means, {key: statistic.cpu().numpy() for key, statistic in statistics.items()})


def _metrics(task: Task, output: Any, target: Any, size: int) -> Mapping[str, Tensor]:
    with task_code("the task's model or metrics"):
        values = task.metrics(output, target)
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


def estimate_statistics(task: Task, model: nn.Module, data: Data, batch_size: int) -> int:
    """Set the statistics of batch normalisation to their means over the batches of `data`. Returns how many layers.

    A mean of several models needs it: the mean of their statistics is not that of their mean. Only layers that would
    update their statistics in training are changed; all others compute as in an evaluation. Labels are not read by the
    model, but a task's own forward() sees them. A batch of one example is left out: it may have no variance.

    Raises TaskError for data without two examples in a batch, and for an error of the task's code.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.training]
    tracked = [(layer, layer.num_batches_tracked) for layer in layers]
    counts = [(count, int(count)) for _, count in tracked if count is not None]
    layers = [layer for layer, count in tracked if count is not None]
    if not layers:
        return 0
    momenta = [(layer, layer.momentum) for layer in layers]
    with evaluation_mode(model):
        for layer in layers:
            layer.train()
            layer.momentum = None  # the mean over batches
            layer.reset_running_stats()
        try:
            _run(task, model, data, batch_size)
        finally:
            for layer, momentum in momenta:
                layer.momentum = momentum
            for count, before in counts:
                count.fill_(before)
    return len(layers)


def _run(task: Task, model: nn.Module, data: Data, batch_size: int) -> None:
    device, forward = next((parameter.device for parameter in model.parameters()), None), forward_of(task)
    batches = 0
    with torch.no_grad(), task_code("the task's model"):
        for raw in ordered_batches(data, batch_size):
            if examples_of(raw) < 2:
                continue
            forward(model, raw if device is None else to_device(raw, device))
            batches += 1
    if not batches:
        raise TaskError("expected a batch of two examples or more to estimate statistics from, got none")
