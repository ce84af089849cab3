"""Reads the batches of a data set: in this process, or in worker processes that stay for later rounds.

Generators are seeded for each example, so the number of workers changes no bit. Workers are forked from a server
process of their own, never from this one, whose threads a fork would not survive.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils import data
from torch.utils.data import default_collate

from algorithms.batches import Batch
from algorithms.outside_code import described, is_interrupt
from fl_tasks.data.seeds import generators_kept, seed_generators
from fl_tasks.errors import TaskError
from fl_tasks.torchvision_compat import declare_missing_operators

# Before a task's module is imported, here or in a process that reads its data: it may import torchvision itself, or
# through peft or transformers.
declare_missing_operators()

Collate = Callable[[list[Any]], Batch]
"""A list of examples, as the data set returns them -> a batch."""

Result = TypeVar("Result")

MOST_IDLE = 2
"""Data sets of this process whose workers stay between rounds: the one to train on and the one to evaluate on."""


class Order(NamedTuple):
    """The examples of one batch."""

    positions: Sequence[int]
    seeds: Sequence[int]
    """The seeds of the random generators, one for each example."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception in a worker. Exceptions themselves may not be picklable."""

    message: str
    out_of_memory: bool
    trace: str


class BatchReader(data.Dataset[Any]):
    """Makes the batch of an order from a map-style data set."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self._dataset, self._collate = dataset, collate or default_collate

    def __getitem__(self, order: Order) -> Batch | _Failure:
        """The batch of an order; in a worker, its exception as a value."""
        try:
            return self.read(order)
        except BaseException as error:  # noqa: BLE001 - an error of the task's code, of any type; the caller raises it
            return _Failure(str(error), isinstance(error, MemoryError), traceback.format_exc())

    def read(self, order: Order) -> Batch:
        """The batch of an order. Raises TaskError with the exception of the task's code as cause."""
        samples = self._samples(order)
        try:
            return self._collate(samples)
        except MemoryError:
            raise
        except BaseException as error:
            if is_interrupt(error):
                raise
            raise TaskError(
                f"the collate function raised {described(error)}; it gets a list of"
                f" {len(samples)} examples of type {type(samples[0]).__name__}"
            ) from error

    def _samples(self, order: Order) -> list[Any]:
        dataset, indices = _unwrapped(self._dataset, order.positions)
        if callable(many := getattr(dataset, "__getitems__", None)):
            seed_generators(order.seeds[0])
            return _called(lambda: list(many(indices)), f"examples {indices[0]} and others")
        samples = []
        for index, seed in zip(indices, order.seeds, strict=True):
            seed_generators(seed)
            samples.append(_called(lambda index=index: dataset[index], f"example {index}"))  # type: ignore[misc]
        return samples


def _called(read: Callable[[], Result], what: str) -> Result:
    try:
        return read()
    except MemoryError:
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise TaskError(f"reading {what} of the data raised {described(error)}") from error


def _unwrapped(dataset: Any, positions: Sequence[int]) -> tuple[Any, list[int]]:
    """The data set inside subsets, and the indices there: it may read many examples in one call."""
    indices = list(positions)
    while type(dataset) is data.Subset:
        inner = dataset.indices
        dataset, indices = dataset.dataset, [int(inner[index]) for index in indices]
    return dataset, indices


class Reading:
    """Reads batches of one data set. One iteration at a time."""

    def __init__(self, dataset: Any, collate: Collate | None, workers: int, prefetch: int, *, pinned: bool) -> None:  # noqa: PLR0913 - as Samples
        self._reader = BatchReader(dataset, collate)
        self._workers, self._prefetch, self._pinned = workers, prefetch, pinned
        self._plan = _Plan()
        self._loader: data.DataLoader[Any] | None = None
        self._iteration = 0
        self.busy = False

    def batches(self, orders: Iterator[Order]) -> Iterator[Batch]:
        """The batches of the orders, one after the other. Random generators of this process stay as they are."""
        if not self._workers:
            for order in orders:
                with generators_kept():
                    batch = self._reader.read(order)
                yield batch
            return
        yield from self._from_workers(orders)

    def close(self) -> None:
        """Stop the workers, if there are any. A later iteration starts new ones."""
        self._loader = None  # its iterator stops the processes when it is freed

    def _from_workers(self, orders: Iterator[Order]) -> Iterator[Batch]:
        self._iteration += 1
        mine = self._iteration
        _used(self)
        try:
            for batch in self._started(orders):
                if isinstance(batch, _Failure):
                    raise _error_of(batch)
                yield batch
                if mine != self._iteration:
                    raise RuntimeError("expected one iteration over a data set with workers at a time, got two")
        except GeneratorExit:
            raise  # the caller needs no more batches; the workers stay
        except (OSError, EOFError) as error:  # the connection to a worker, whose own errors are values
            self.close()
            raise RuntimeError(f"a worker of the data set ended while it sent a batch: {error!r}") from error
        except BaseException:
            self.close()
            raise
        finally:
            self.busy = self.busy and mine != self._iteration

    def _started(self, orders: Iterator[Order]) -> Iterator[Batch]:
        self._plan.orders = orders
        if self._loader is None:
            self._loader = self._make()
        try:
            return iter(self._loader)
        except BaseException as error:  # pickle raises errors of many types
            if is_interrupt(error):
                raise
            raise TaskError(
                f"workers = {self._workers}: the data set cannot be read in other processes: {described(error)};"
                f" use classes and functions of a module for data set and collate (no lambda, no"
                " inner function), open files in __getitem__, or set workers = 0"
            ) from error

    def _make(self) -> data.DataLoader[Any]:
        return data.DataLoader(
            self._reader,
            batch_size=None,
            sampler=self._plan,
            num_workers=self._workers,
            collate_fn=_as_it_is,
            pin_memory=self._pinned,
            prefetch_factor=self._prefetch,
            persistent_workers=True,
            multiprocessing_context=_context(),
            worker_init_fn=_watch_parent,
            generator=torch.Generator(),  # the default one is for dropout
        )


class _Plan(data.Sampler[Any]):
    """The orders of the iteration in progress."""

    def __init__(self) -> None:
        self.orders: Iterator[Order] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.orders

    def __getstate__(self) -> None:
        """Nothing: workers do not need it."""


_idle: list[Reading] = []
"""Readings with workers, the least recently used first."""
_lock = threading.Lock()


def _used(reading: Reading) -> None:
    """Note that a reading begins, and stop the workers of those that were not used for longest."""
    with _lock:
        reading.busy = True
        if reading in _idle:
            _idle.remove(reading)
        for other in [reader for reader in _idle if not reader.busy][: max(len(_idle) + 1 - MOST_IDLE, 0)]:
            other.close()
            _idle.remove(other)
        _idle.append(reading)


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Modules that all workers need are imported once. Has no effect if this process has such a server already.
    context.set_forkserver_preload(["fl_tasks.data.reading"])
    return context


def _error_of(failure: _Failure) -> Exception:
    if failure.out_of_memory:
        return MemoryError(failure.message)
    error = TaskError(failure.message)
    error.add_note(f"In the worker:\n{failure.trace}")
    return error


def _watch_parent(worker: int) -> None:
    """End this worker with the process that reads the batches, also when that one is killed.

    torch watches the process that forked the worker. That is the forkserver, which lives as long as a worker.
    """
    threading.Thread(target=_end_with_parent, name=f"reader-{worker}", daemon=True).start()


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _as_it_is(batch: Batch) -> Batch:
    return batch
