"""Evaluation of a model: the task's metrics, averaged over examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tasks.base import Examples, Task, TaskError, task_code


def evaluate(task: Task, model: nn.Module, examples: Examples, batch_size: int = 512) -> dict[str, float]:
    """Mean of every metric over `examples`, summed in float64, on the model's device.

    The model stays unchanged, including its training modes. Raises TaskError for no examples, and if the metrics are
    not one value for each example under the same names in every batch.
    """
    if not len(examples):
        raise TaskError("expected at least one example to evaluate on, got none")
    device = next((p.device for p in model.parameters()), examples.inputs.device)
    sums: dict[str, Tensor] = {}
    with _evaluation_mode(model), torch.no_grad():
        for start in range(0, len(examples), batch_size):
            batch = examples[start : start + batch_size].to(device)
            values = _metrics(task, model, batch)
            if sums and set(values) != set(sums):
                raise TaskError(f"expected the metrics {sorted(sums)} of every batch, got {sorted(values)}")
            for name, value in values.items():
                sums[name] = sums.get(name, 0) + value.double().sum()
    return {name: float(total) / len(examples) for name, total in sums.items()}


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


def _metrics(task: Task, model: nn.Module, batch: Examples) -> Mapping[str, Tensor]:
    with task_code("the task's model or metrics"):
        values = task.metrics(model(batch.inputs), batch.targets)
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.shape != (len(batch),):
            came = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TaskError(
                f'expected the metric "{name}" as a tensor with one value for each example, shape [{len(batch)}], got'
                f" {came}: leave the averaging to the caller"
            )
    return values
