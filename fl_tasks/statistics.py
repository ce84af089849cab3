"""The running statistics of batch normalisation, computed anew for the values that a model has."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from algorithms.batches import examples_of, to_device
from fl_tasks.base import Task
from fl_tasks.batches import ordered_batches
from fl_tasks.data.forms import Data, forward_of
from fl_tasks.errors import TaskError, task_code


def estimate_statistics(task: Task, model: nn.Module, data: Data, batch_size: int) -> int:
    """Set the statistics of batch normalisation to their means over the batches of `data`. Returns how many layers.

    A mean of several models needs it: the mean of their statistics is not that of their mean. Only layers that would
    update their statistics in training are changed; all others compute as in an evaluation. Labels are not read by the
    model, but a task's own forward() sees them. A batch of one example is left out: it may have no variance.

    Raises TaskError for data without two examples in a batch, and for an error of the task's code.
    """
    layers = [each for each in model.modules() if isinstance(each, _BatchNorm) and each.training]
    tracked = [(each, each.num_batches_tracked) for each in layers]
    counts = [(count, int(count)) for _, count in tracked if count is not None]
    layers = [each for each, count in tracked if count is not None]
    if not layers:
        return 0
    modes = [(each, each.training) for each in model.modules()]
    momenta = [(each, each.momentum) for each in layers]
    model.eval()
    for each in layers:
        each.train()
        each.momentum = None  # the mean over batches
        each.reset_running_stats()
    try:
        _run(task, model, data, batch_size)
    finally:
        for each, momentum in momenta:
            each.momentum = momentum
        for count, before in counts:
            count.fill_(before)
        for module, training in modes:
            module.training = training
    return len(layers)


def _run(task: Task, model: nn.Module, data: Data, batch_size: int) -> None:
    device, forward = next((each.device for each in model.parameters()), None), forward_of(task)
    batches = 0
    with torch.no_grad(), task_code("the task's model"):
        for raw in ordered_batches(data, batch_size):
            if examples_of(raw) < 2:
                continue
            forward(model, raw if device is None else to_device(raw, device))
            batches += 1
    if not batches:
        raise TaskError("expected a batch of two examples or more to estimate statistics from, got none")
