"""Runs the cells of a plan in worker processes with one torch thread each, until none is missing or time is up."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from types import FrameType
from typing import NamedTuple, Protocol

from fl_common.allocator import keep_freed_memory
from fl_common.program import silence_libraries
from fl_ops.compare.cells import Cell, CellFolder, CellResult, RoundRow
from fl_ops.compare.plan import Plan
from fl_ops.compare.progress import Costs, Sharing
from fl_ops.compare.run_cell import Means, OnRound
from fl_ops.errors import Refused
from fl_ops.worker_process import become_worker

_POLL_S = 0.5
"""Longest time until the rounds of running cells are reported."""

_GRACE_S = 20.0
"""Time for a process that is given up to save its run. One that needs longer goes back to its last save."""


@dataclass(frozen=True)
class Job:
    """How to run a cell, and the folder for its file. `run` must be importable: processes receive it by name."""

    run: Callable[[Cell, OnRound, Means], CellResult]
    """The function is called after each round."""
    folder: CellFolder


class Watch(Protocol):
    """Is called in this process as the work goes on."""

    def round_done(self, cell: Cell, row: RoundRow) -> None:
        """A worker has finished a round of a cell."""

    def cell_done(self, cell: Cell, result: CellResult) -> None:
        """A worker has written a cell's file."""


@dataclass(frozen=True)
class Work:
    """What to run. seconds: stop after so long; None is no limit. costs: the expected times, which rounds update."""

    plan: Plan
    job: Job
    processes: int = 1
    seconds: float | None = None
    costs: Costs = field(default_factory=Costs)
    sharing: Sharing | None = None
    """Decides when runs that share a GPU begin. None: all begin at once."""


_Rounds = SimpleQueue[tuple[str, RoundRow]]
"""What workers report: (digest of a cell, its round)."""


def run_all(work: Work, watch: Watch) -> bool:
    """Run all missing cells. No process is left, however this ends. Returns whether none is missing now.

    At the time limit, as after Ctrl-C, running cells save their state and end; the next call continues them.

    Raises:
        Refused: a process ended unexpectedly. Errors of a cell are raised unchanged. Finished cells are kept.
    """
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    rounds: _Rounds = context.SimpleQueue()
    executor = ProcessPoolExecutor(work.processes, context, _initialize, (rounds,))
    complete = False
    try:
        complete = _Runner(work, watch, executor, rounds).run()
    except BrokenProcessPool as error:
        raise Refused(f"a process that ran a cell ended unexpectedly, possibly out of memory ({error})") from error
    finally:
        if not complete:
            _end(set(multiprocessing.active_children()) - others)
        executor.shutdown(cancel_futures=True)
        rounds.close()
    return complete


class _Running(NamedTuple):
    """A cell in a worker, and the processes that it uses."""

    cell: Cell
    processes: int


class _Runner:
    """Keeps all processes busy, with one cell each: the next cells may depend on the results of the running ones.

    When fewer cells can be run than processes are free, as at the end of a table, the cells share the free processes.
    """

    def __init__(self, work: Work, watch: Watch, executor: ProcessPoolExecutor, rounds: _Rounds) -> None:
        self._work = work
        self._watch = watch
        self._executor = executor
        self._rounds = rounds
        self._running: dict[Future[CellResult], _Running] = {}
        self._end = math.inf if work.seconds is None else time.monotonic() + work.seconds

    def run(self) -> bool:
        """Returns whether no cell is missing now."""
        self._start()
        while self._running:
            left = self._end - time.monotonic()
            if left <= 0:
                return False
            done = wait(self._running, timeout=min(left, _POLL_S), return_when=FIRST_COMPLETED).done
            self._report_rounds()
            for future in done:
                cell = self._running.pop(future).cell
                self._watch.cell_done(cell, future.result())
                if self._work.sharing is not None:
                    self._work.sharing.ended(cell.digest)
            others_may_begin = self._work.sharing is not None and self._most > len(self._running) == 1
            if done or others_may_begin:
                self._start()
        return not self._work.plan.missing()

    def _start(self) -> None:
        work, cells = self._work, self._cells_to_start()
        free = self._most - sum(worker.processes for worker in self._running.values())
        for number, cell in enumerate(cells[:free]):
            share = shares(free, len(cells))[number]
            future = self._executor.submit(_run_one, work.job, cell, share)
            self._running[future] = _Running(cell, share)

    @property
    def _most(self) -> int:
        """The most processes at work now."""
        alone = self._work.sharing is not None and not self._work.sharing.begins_others
        return 1 if alone else self._work.processes

    def _cells_to_start(self) -> list[Cell]:
        """The cells that can be started, each digest once."""
        known, cells = {worker.cell.digest for worker in self._running.values()}, list[Cell]()
        for cell in self._work.plan.missing(self._work.costs.of_cell):
            if cell.digest not in known:
                known.add(cell.digest)
                cells.append(cell)
        return cells

    def _report_rounds(self) -> None:
        running = {worker.cell.digest: worker for worker in self._running.values()}
        while not self._rounds.empty():
            digest, row = self._rounds.get()
            cell, processes = running[digest]
            self._work.costs.add(cell, row.seconds * processes)
            if self._work.sharing is not None:
                self._work.sharing.add(digest, row.seconds, running)
            self._watch.round_done(cell, row)


def shares(free: int, cells: int) -> list[int]:
    """The processes of each cell: one, or more where there are fewer cells than free processes."""
    if cells >= free:
        return [1] * free
    return [free // cells + (number < free % cells) for number in range(cells)]


def _run_one(job: Job, cell: Cell, workers: int) -> CellResult:
    """Run one in a worker. The file is written before the result is reported."""
    try:
        means = Means(workers, job.folder.saved(cell))
        result = job.run(cell, lambda row: _REPORT[0].put((cell.digest, row)), means)
    except SystemExit:
        os._exit(1)  # given up: the run has saved its state and removed its temporary files by now
    job.folder.save(cell, result)
    return result


def _initialize(rounds: _Rounds) -> None:
    """Prepare a new worker."""
    become_worker()
    signal.signal(signal.SIGTERM, _give_up)
    keep_freed_memory()
    silence_libraries()
    _REPORT.append(rounds)


def _give_up(number: int, _frame: FrameType | None) -> None:
    """End through the run's own clean-up. The pool sends the signal again when it sees that another process ended."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(1)


_REPORT: list[_Rounds] = []
"""The queue of the process that started this worker."""


def _end(processes: Iterable[BaseProcess]) -> None:
    """End processes in the middle of their work; they save it and remove their temporary files."""
    left = list(processes)
    for process in left:
        process.terminate()
    until = time.monotonic() + _GRACE_S
    for process in left:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
