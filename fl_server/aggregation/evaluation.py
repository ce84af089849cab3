"""Evaluation of the server's model on the task's held-out examples, on a CPU or another device."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fl_server.aggregation.blocks import CPU
from tasks import Task
from tasks.data.forms import Data, as_data
from tasks.errors import task_code
from tasks.evaluation import evaluate


class ServerEvaluation:
    """The task's metrics on the server's held-out examples, which are read once. For one thread at a time."""

    def __init__(self, task: Task, device: torch.device) -> None:
        """device: of the examples and of the model during an evaluation."""
        self._task, self._device = task, device
        self._held_out: Data | None = None

    def metrics(self, model: nn.Module, batch_size: int | None) -> dict[str, float]:
        """Mean of every metric over the examples. model: on the CPU; it stays there. Raises as `evaluate`."""
        if self._held_out is None:
            with task_code("the task's eval_data()"):
                self._held_out = as_data(self._task.eval_data()).to(self._device)
        if self._device != CPU:
            # Moved itself, the module would lose the memory that its owner fills.
            model = copy.deepcopy(model).to(self._device)
        return evaluate(self._task, model, self._held_out, batch_size)
