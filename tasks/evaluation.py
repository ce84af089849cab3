"""Evaluation of a model: the task's metrics, averaged over examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from algorithms.batches import Batch, Forward, examples_of, to_device
from tasks.base import Task
from tasks.batches import ordered_batches
from tasks.data.forms import TaskData, as_data, forward_of
from tasks.errors import TaskError, task_code

CPU_BATCH, DEVICE_BATCH = 128, 512
"""Examples of a batch. On a CPU the activations of larger batches leave the caches, and blocks over 32 MiB are mapped
anew by every layer. Other devices need large batches."""


def evaluate(task: Task, model: nn.Module, data: TaskData, batch_size: int | None = None) -> dict[str, float]:
    """Mean of every metric over `data`, summed in float64, on the model's device.

    batch_size: None: CPU_BATCH or DEVICE_BATCH, by the model's device.
    The model stays unchanged, including its training modes. Raises TaskError for no examples, if the metrics are not
    one value for each example under the same names in every batch, and if batches of the task's own have another
    number of examples than it states.
    """
    data = as_data(data)
    if not len(data):
        raise TaskError("expected at least one example to evaluate on, got none")
    device = next((p.device for p in model.parameters()), None)
    batch_size = batch_size or (CPU_BATCH if device is None or device.type == "cpu" else DEVICE_BATCH)
    forward, sums, count = forward_of(task), dict[str, Tensor](), 0
    with _evaluation_mode(model), torch.no_grad():
        for raw in ordered_batches(data, batch_size):
            batch = raw if device is None else to_device(raw, device)
            values = _metrics(task, forward, model, batch)
            if sums and set(values) != set(sums):
                raise TaskError(f"expected the metrics {sorted(sums)} of every batch, got {sorted(values)}")
            for name, value in values.items():
                sums[name] = sums.get(name, 0) + value.double().sum()
            count += examples_of(batch)
    if count != len(data):
        raise TaskError(f"expected {len(data)} examples to evaluate on, as the task states, got {count}")
    return {name: float(total) / count for name, total in sums.items()}


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
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.shape != (size,):
            came = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TaskError(
                f'expected the metric "{name}" as a tensor with one value for each example, shape [{size}], got'
                f" {came}: leave the averaging to the caller"
            )
    return values
