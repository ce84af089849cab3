"""Data whose batches the task makes itself: a stream of files, batches by length, or another library's loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from algorithms.batches import Batch, to_device
from fl_tasks.data.examples import LabelRange
from fl_tasks.data.seeds import generators_kept, seed_generators, seed_of_epoch
from fl_tasks.errors import TaskError, task_code


@dataclass(frozen=True, eq=False)
class Batched:
    """An iterable of batches with a stated length, made anew for each epoch. The run's batch size does not apply.

    The generators of torch (on the CPU), NumPy and Python are seeded before each batch is made.
    """

    batches: Callable[[int], Iterable[Batch]]
    """Seed, from 0 to 2^32 - 1 -> the batches of one epoch. Equal seeds must give equal batches. The seed follows from
    round, client and epoch; it is 0 for an evaluation and a full gradient."""
    length: int
    """Batches of an epoch. Further ones are not read, so the iterable may be endless; fewer are an error."""
    examples: int
    """Examples of an epoch: the weight of this client, where weights are by examples."""
    device: torch.device = field(default=torch.device("cpu"), kw_only=True)
    """Device of the batches."""
    label_range: LabelRange | None = field(default=None, kw_only=True, repr=False)
    """The labels of batches are checked against it, if there is one: set where a task names its classes."""

    def __post_init__(self) -> None:
        if not callable(self.batches):
            raise TaskError(
                "expected a function of a seed that returns the batches of one epoch, as in Batched(lambda seed:"
                f" make_loader(seed), length, examples), got {type(self.batches).__name__}"
            )
        if not 0 <= self.length <= self.examples or (self.examples and not self.length):
            raise TaskError(
                "expected a length of 1 or more batches with at least one example each, or none of both, got"
                f" length = {self.length} and examples = {self.examples}"
            )

    def __len__(self) -> int:
        return self.examples

    @property
    def own_batches(self) -> int:
        """Batches of an epoch."""
        return self.length

    def to(self, device: torch.device | str) -> Batched:
        """The same batches on a device."""
        return replace(self, device=torch.device(device))

    def epochs(self, seed: int, first: int = 0) -> Iterator[Batch]:
        """The batches of one epoch after the other, without end. Raises TaskError for an epoch that is too short."""
        for epoch in count(first):
            yield from self.epoch(seed_of_epoch(seed, epoch))

    def epoch(self, seed: int) -> Iterator[Batch]:
        """The batches of one epoch. Raises TaskError for too few, and for an error in the task's code."""
        with task_code("making the batches of an epoch"), _seeded(seed, 0):
            batches = iter(self.batches(seed))
        for number in range(self.length):
            try:
                with task_code(f"making batch {number} of an epoch"), _seeded(seed, number + 1):
                    batch = next(batches, _END)
            except RuntimeError as error:  # a StopIteration within a generator
                raise TaskError(f"making batch {number} of an epoch raised {error}") from error
            if batch is _END:
                raise TaskError(
                    f"expected {self.length} batches in an epoch, as Batched(..., length, examples) states, got"
                    f" {number}: state the number that the iterable has on this device"
                )
            yield to_device(batch if self.label_range is None else self.label_range.checked(batch), self.device)


@contextmanager
def _seeded(seed: int, number: int) -> Iterator[None]:
    """Random generators seeded for a part of an epoch; after it they continue as if it had not been made."""
    with generators_kept():
        seed_generators(seed_of_epoch(seed, number))
        yield


_END = object()
