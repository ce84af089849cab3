"""An evaluation on another device than a CPU as one recorded step, which is played for each full batch.

The step reads the number of its batch from the device, and adds the batch's metrics to sums there, in the order in
which an evaluation batch by batch adds them. Nothing comes from the host until the last, shorter batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from algorithms.batched.recording import NotRecorded, Step, record
from fl_tasks import Examples, Task, TaskError
from fl_tasks.batches import ordered_batches
from fl_tasks.evaluation import BatchSums, sums_of_batches


class RecordedEvaluation:
    """The sums of the metrics of a model in fixed memory, over examples on its device."""

    def __init__(self, task: Task, model: nn.Module, examples: Examples, batch_size: int) -> None:
        """Make the first batch, and record the step.

        Raises TaskError as an evaluation does, and NotRecorded with the reason for what cannot be recorded.
        """
        self._task, self._model, self._examples, self._size = task, model, examples, batch_size
        self._full = len(examples) // batch_size
        if self._full < 2:
            raise NotRecorded(f"there are {len(examples)} examples, less than two batches of {batch_size}")
        [first] = sums_of_batches(task, model, [next(iter(ordered_batches(examples, batch_size)))])
        device = examples.inputs.device
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._rows = torch.arange(batch_size, device=device)
        self._sums = {name: torch.zeros_like(torch.as_tensor(value)) for name, value in first.sums.items()}
        self._statistics = {key: torch.zeros_like(torch.as_tensor(value)) for key, value in first.statistics.items()}
        try:
            self._play: Step = record(self._step, self._memory, device)
        except torch.OutOfMemoryError as error:
            raise NotRecorded("there is no memory for it") from error
        except TaskError as error:  # of the recording: the same batch has just been evaluated
            raise NotRecorded(str(error)[:200]) from error

    @property
    def _memory(self) -> list[Tensor]:
        return [self._number, *self._sums.values(), *self._statistics.values()]

    def _step(self) -> None:
        batch = self._examples[self._number * self._size + self._rows]
        [found] = sums_of_batches(self._task, self._model, ordered_batches(batch, self._size))
        for name, total in self._sums.items():
            total.add_(found.sums[name])
        for key, statistic in self._statistics.items():
            statistic.add_(torch.as_tensor(found.statistics[key]))
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
