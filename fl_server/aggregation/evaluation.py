"""The model of a task in this process, evaluated on the held-out examples, on a CPU or another device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import algorithms as fl
from algorithms.batched.recording import NotRecorded, Recorder, Step
from algorithms.model_state import fill
from fl_common.units import counted
from fl_server.aggregation.task_model import CPU, TaskModel
from fl_tasks import Task, TaskError
from fl_tasks.batches import ordered_batches
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
    estimate_statistics,
    finished,
    names_of,
    sums_of_batches,
    totals_of,
)


class RecordedEvaluation:
    """The sums of the metrics of a model over examples on its device: one recorded step, played for each full batch.

    The step reads the number of its batch from the device, and adds the batch's metrics to sums there, in the order in
    which an evaluation batch by batch adds them. Nothing comes from the host until the last, shorter batch.
    """

    def __init__(self, task: Task, model: nn.Module, examples: Examples, batch_size: int) -> None:
        """Make the first batch, and record the step.

        Raises TaskError as an evaluation does, and NotRecorded with the reason for what cannot be recorded.
        """
        self._task, self._model, self._examples, self._size = task, model, examples, batch_size
        self._full = len(examples) // batch_size
        if self._full < 2:
            raise NotRecorded(f"{counted(len(examples), 'example')}, less than two batches of {batch_size}")
        [first] = sums_of_batches(task, model, [next(iter(ordered_batches(examples, batch_size)))])
        device = examples.inputs.device
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._rows = torch.arange(batch_size, device=device)
        self._sums = {name: torch.zeros_like(torch.as_tensor(value)) for name, value in first.sums.items()}
        self._statistics = {key: torch.zeros_like(torch.as_tensor(value)) for key, value in first.statistics.items()}
        try:
            self._play: Step = Recorder(device).record(self._step, self._memory)
        except torch.OutOfMemoryError as error:
            raise NotRecorded("there is no memory for it") from error
        except TaskError as error:  # of the recording: the same batch has just been evaluated
            raise NotRecorded(str(error)[:200]) from error

    @property
    def _memory(self) -> list[Tensor]:
        return [self._number, *self._sums.values(), *self._statistics.values()]

    def _step(self) -> None:
        batch = self._examples[self._number * self._size + self._rows]
        [came] = sums_of_batches(self._task, self._model, ordered_batches(batch, self._size))
        for name, total in self._sums.items():
            total.add_(came.sums[name])
        for key, statistic in self._statistics.items():
            statistic.add_(torch.as_tensor(came.statistics[key]))
        self._number.add_(1)

    def batches(self) -> Iterator[BatchSums]:
        """The sums over all full batches, then those of the last, shorter one. Raises TaskError."""
        for tensor in self._memory:
            tensor.zero_()
        for _ in range(self._full):
            self._play()
        done = self._full * self._size
        yield BatchSums(self._sums, done, self._statistics)
        rest = self._examples[done:]
        if len(rest):
            yield from sums_of_batches(self._task, self._model, ordered_batches(rest, self._size))


class EvaluatedModel(TaskModel):
    """One run's module with the task's metrics on the held-out examples, which are read once. Not for two threads.

    `RemoteModel` has the same methods for a task in a process of its own.
    """

    def __init__(self, task: Task, device: torch.device, batch_size: int, **options: Any) -> None:
        """Take the options of `TaskModel`, and these.

        device: of the examples and of the model during an evaluation. batch_size: 0: chosen for the device.
        """
        super().__init__(task, **options)
        self._device, self._batch_size = device, batch_size or batch_size_on(device)
        self._held_out: Data | None = None
        self._placed = False
        """Whether the examples are on the device."""
        self._recorded: RecordedEvaluation | None = None
        self._not_recorded = ""
        """Why not."""
        self._there: nn.Module | None = None
        """The module on another device than the CPU; it stays there."""
        self._left = ""
        """Why the evaluation under way is to be left at its next batch; empty: it goes on."""

    def evaluate(self, values: fl.ModelState, *, estimate: bool = False) -> dict[str, float]:
        """The task's metrics of a model with these values, over all examples.

        estimate: compute the running statistics of the model anew first, from the examples' inputs.

        Raises as `fl_tasks.evaluate`, and EvaluationLeft after `leave`.
        """
        with self._filled(values) as model:
            self._left = ""
            with task_call("the task's evaluation"):
                data = self.held_out()
                if estimate and len(data):
                    estimate_statistics(self._task, model, data, self._batch_size)
                batches = self._until_left(self._sums_of(model, data))
                metrics = finished(self._task, totals_of(batches, len(data)))
            del model, batches  # with the model goes its memory, when the block ends
        return metrics

    def _filled(self, values: fl.ModelState) -> AbstractContextManager[nn.Module]:
        """See `filled`; on the device."""
        # No block around `filled`: its variable would hold the module, which would be built again each time.
        return self.filled(values) if self._device == CPU else self._filled_there(values)

    @contextmanager
    def _filled_there(self, values: fl.ModelState) -> Iterator[nn.Module]:
        if self._there is None:  # a copy: moved itself, the module would lose the memory that is filled
            with self.filled(values) as module:
                self._there = copy.deepcopy(module).to(self._device)
        fill(self._views(self._there), values)
        yield self._there

    def _sums_of(self, model: nn.Module, data: Data) -> Iterator[BatchSums]:
        """The metrics of the batches; on another device than a CPU as a recorded step, if that is possible."""
        if self._device != CPU and self._recorded is None and not self._not_recorded:
            try:
                if not isinstance(data, Examples):
                    raise NotRecorded("the held-out data are not those of one tensor of examples")
                self._recorded = RecordedEvaluation(self._task, model, data, self._batch_size)
            except NotRecorded as error:
                self._not_recorded = str(error)
        if self._recorded is not None:
            return self._recorded.batches()
        return sums_of_batches(self._task, model, batches_of(data, self._batch_size))

    @property
    def report(self) -> str:
        """How the evaluation is made, for the user; empty on a CPU, and before the first one."""
        if self._not_recorded:
            return f"the evaluation is not recorded ({self._not_recorded})"
        return "" if self._recorded is None else "the evaluation is a recorded step"

    def _until_left(self, batches: Iterator[BatchSums]) -> Iterator[BatchSums]:
        for batch in batches:
            if self._left:
                raise EvaluationLeft(self._left)
            yield batch

    def leave(self, why: str) -> None:
        """End the evaluation under way at its next batch. Thread-safe."""
        self._left = why

    def finished(self, totals: Totals) -> dict[str, float]:
        """The metrics of an evaluation whose parts were computed alone. Raises TaskError."""
        return finished(self._task, totals)

    def names(self, values: fl.ModelState) -> list[str] | None:
        """Names of the metrics, from the first batch; None without examples. Raises TaskError."""
        if not len(data := self.held_out()):
            return None
        with self._filled(values) as model:
            with task_call("the task's evaluation"):
                first = list(sums_of_batches(self._task, model, islice(batches_of(data, self._batch_size), 1)))
                names = names_of(self._task, totals_of(first, sum(batch.examples for batch in first)))
            del model
        return names

    def whole(self, values: fl.ModelState, *, estimate: bool = False) -> fl.Tensors:
        """The whole state_dict with these values, in memory of its own. estimate: as in `evaluate`."""
        with self._filled(values) as module:
            if estimate and len(data := self.held_out()):
                with task_call("the task's evaluation"):
                    estimate_statistics(self._task, module, data, self._batch_size)
            whole = {name: tensor.to(CPU, copy=True) for name, tensor in module.state_dict().items()}
            del module
        return whole

    def batches(self) -> int | None:
        """Number of batches if parts of the evaluation can be computed alone; None if they cannot. Raises TaskError."""
        data = self.held_out()
        return -(-len(data) // self._batch_size) if isinstance(data, Examples) and self._device == CPU else None

    def part(self, values: fl.ModelState, first: int, last: int) -> list[BatchSums]:
        """The batches from `first` up to `last`, on the CPU, in order, with sums as numbers."""
        with self._filled(values) as module:
            batches = sums_of_batches(
                self._task, module, islice(batches_of(self.held_out(), self._batch_size), first, last)
            )
            del module
            sums = [
                BatchSums(
                    {name: float(total) for name, total in batch.sums.items()},
                    batch.examples,
                    {key: np.asarray(total) for key, total in batch.statistics.items()},
                )
                for batch in batches
            ]
            del batches
        return sums

    def read_held_out(self) -> Data:
        """The examples, on the CPU until `held_out` is called. The first call reads them. Raises TaskError."""
        if self._held_out is None:
            with task_call("the task's eval_data()"):
                data = as_data(self._task.eval_data())
            self._held_out = numbered(self._task, data, "the held-out data of the coordinator")
        return self._held_out

    def held_out(self) -> Data:
        """The examples, on the device, where they stay. Raises TaskError."""
        if not self._placed:
            self._held_out, self._placed = self.read_held_out().to(self._device), True
        return self.read_held_out()
