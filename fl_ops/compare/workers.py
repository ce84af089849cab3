"""The cells of a plan, run by processes of one torch thread each until none is missing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from fl_ops.compare.cells import Cell, CellFolder, CellResult
from fl_ops.compare.plan import Plan
from fl_ops.errors import Refused

Run = Callable[[Cell], CellResult]
"""What runs a cell; must be importable, for it is sent to other processes by name."""


@dataclass(frozen=True)
class Job:
    """How a cell is run and where its file goes."""

    run: Run
    folder: CellFolder


def run_all(plan: Plan, job: Job, processes: int, told: Callable[[Cell, CellResult], None]) -> None:
    """Runs what is missing; `told` hears of every cell that is done. However it ends, no process is left.

    Raises:
        Refused: a process ended by itself. Errors of a cell come as they are; what is finished stays.
    """
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin)
    try:
        _run_all(executor, plan, job, processes, told)
    except BrokenProcessPool as error:
        raise Refused(f"a process that ran a cell ended by itself, out of memory? ({error})") from error
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _run_all(
    executor: ProcessPoolExecutor, plan: Plan, job: Job, processes: int, told: Callable[[Cell, CellResult], None]
) -> None:
    running: dict[Future[CellResult], Cell] = {}
    while True:
        under_way = {cell.digest for cell in running.values()}
        # No more than can run: what comes next may depend on what is running.
        for cell in plan.missing():
            if len(running) < processes and cell.digest not in under_way:
                under_way.add(cell.digest)
                running[executor.submit(_run_one, job, cell)] = cell
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            told(running.pop(future), future.result())


def _run_one(job: Job, cell: Cell) -> CellResult:
    """In a worker: the file is there before anybody hears of the result."""
    result = job.run(cell)
    job.folder.save(cell, result)
    return result


def _begin() -> None:
    """In a new worker: one thread, no Ctrl-C of its own, and no life without the comparison."""
    import torch

    from fl_client.allocator import keep_freed_memory

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_freed_memory()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
