"""Evaluation of the server's model on the task's held-out examples, on a CPU or another device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from torch import nn

from fl_server.aggregation.blocks import CPU
from fl_tasks import Task
from fl_tasks.data.examples import Examples
from fl_tasks.data.forms import Data, as_data
from fl_tasks.data.labels import numbered
from fl_tasks.errors import task_call
from fl_tasks.evaluation import (
    BatchSums,
    EvaluationLeft,
    Totals,
    batch_size_on,
    batches_of,
    finished,
    names_of,
    sums_of_batches,
    totals_of,
)
from fl_tasks.statistics import estimate_statistics


class ServerEvaluation:
    """The task's metrics on the server's held-out examples, which are read once. For one thread at a time."""

    def __init__(self, task: Task, device: torch.device, batch_size: int) -> None:
        """device: of the examples and of the model during an evaluation. batch_size: 0: chosen for the device."""
        self._task, self._device = task, device
        self._batch_size = batch_size or batch_size_on(device)
        self._held_out: Data | None = None
        self.left = ""
        """Why the evaluation under way is to be left at its next batch; empty: it goes on."""

    def metrics(self, model: nn.Module, *, estimate: bool = False) -> dict[str, float]:
        """Every metric over the examples. model: on the CPU; it stays there.

        estimate: compute the running statistics of the model anew, from the examples' inputs.

        Raises as `fl_tasks.evaluate`, and EvaluationLeft.
        """
        if self._device != CPU:
            # Moved itself, the module would lose the memory that its owner fills.
            model = copy.deepcopy(model).to(self._device)
        self.left = ""
        with task_call("the task's evaluation"):
            data = self.held_out()
            if estimate and len(data):
                estimate_statistics(self._task, model, data, self._batch_size)
            batches = self._until_left(sums_of_batches(self._task, model, batches_of(data, self._batch_size)))
            return finished(self._task, totals_of(batches, len(data)))

    def finished(self, found: Totals) -> dict[str, float]:
        """The metrics of an evaluation whose parts were computed alone. Raises TaskError."""
        return finished(self._task, found)

    def _until_left(self, batches: Iterator[BatchSums]) -> Iterator[BatchSums]:
        for batch in batches:
            if self.left:
                raise EvaluationLeft(self.left)
            yield batch

    def names(self, model: nn.Module) -> list[str] | None:
        """Names of the metrics, from the first batch; None without examples. model: on the CPU. Raises TaskError."""
        if not len(data := self.held_out()):
            return None
        if self._device != CPU:
            model = copy.deepcopy(model).to(self._device)
        with task_call("the task's evaluation"):
            first = list(sums_of_batches(self._task, model, islice(batches_of(data, self._batch_size), 1)))
            return names_of(self._task, totals_of(first, sum(each.examples for each in first)))

    def estimate(self, model: nn.Module) -> None:
        """Compute the running statistics of a model on the CPU anew, from the examples' inputs. Raises TaskError."""
        with task_call("the task's evaluation"):
            if len(data := self.held_out()):
                on = copy.deepcopy(model).to(self._device) if self._device != CPU else model
                estimate_statistics(self._task, on, data, self._batch_size)
                if on is not model:
                    model.load_state_dict(on.state_dict())

    def batches(self) -> int | None:
        """Number of batches if parts of the evaluation can be computed alone; None if they cannot. Raises TaskError."""
        data = self.held_out()
        return -(-len(data) // self._batch_size) if isinstance(data, Examples) and self._device == CPU else None

    def part(self, model: nn.Module, first: int, last: int) -> list[BatchSums]:
        """The batches from `first` up to `last`, on the CPU, in order, with sums as numbers."""
        batches = islice(batches_of(self.held_out(), self._batch_size), first, last)
        found = sums_of_batches(self._task, model, batches)
        return [
            BatchSums(
                {name: float(total) for name, total in each.sums.items()},
                each.examples,
                {key: np.asarray(total) for key, total in each.statistics.items()},
            )
            for each in found
        ]

    def held_out(self) -> Data:
        """The examples, on the device. The first call reads them. Raises TaskError."""
        if self._held_out is None:
            with task_call("the task's eval_data()"):
                data = as_data(self._task.eval_data())
            self._held_out = numbered(self._task, data, "the held-out data of the coordinator").to(self._device)
        return self._held_out
