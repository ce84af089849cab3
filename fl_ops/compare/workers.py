"""Runs the cells of a plan in worker processes with one torch thread each, until none is missing."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from fl_common.allocator import keep_freed_memory
from fl_ops.compare.cells import Cell, CellFolder, CellResult, RoundRow
from fl_ops.compare.plan import Plan
from fl_ops.errors import Refused
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.reports import RoundResult
from fl_ops.simulate.settings import SimulationConfig, SimulationSection
from fl_ops.simulate.simulation import Simulation
from fl_ops.worker_process import become_worker
from fl_server.run_spec import from_values


@dataclass(frozen=True)
class RunCell:
    """Simulates cells. data_location: options of the task for the location of its data; they change no number."""

    data_location: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, cell: Cell) -> CellResult:
        """Run a cell. A run that diverges is a result, too, with its rounds until then.

        Raises:
            Refused: the run failed for another reason.
            TaskError, AlgorithmError: the run cannot be started.
        """
        run = from_values(dict(cell.settings["run"]))
        task = run.task.model_copy(update={"options": {**run.task.options, **self.data_location}})
        section = SimulationSection.model_validate(cell.settings["simulation"])
        prepared = prepare(SimulationConfig(run.model_copy(update={"task": task}), section), cell.seed)
        began = time.monotonic()
        with Simulation(
            prepared.config, prepared.clients, task=prepared.server_task, devices=prepared.devices
        ) as simulation:
            rounds = tuple(map(_row, simulation.rounds()))
            status, reason = simulation.ending or ("completed", "")
        if status == "failed" and not simulation.diverged:
            raise Refused(f"{cell.label}, {cell.stage} with seed {cell.seed}: {reason}")
        return CellResult(rounds, time.monotonic() - began, len(rounds) if simulation.diverged else None, reason)


def _row(done: RoundResult) -> RoundRow:
    return RoundRow(
        round=done.round,
        accepted=len(done.accepted),
        training_loss=done.training_loss,
        accuracy=done.metrics.get("accuracy"),
        loss=done.metrics.get("loss"),
        bytes_down=done.bytes_down,
        bytes_up=done.bytes_up,
        seconds=round(done.seconds, 4),
        model=done.digest,
        simulated_total_s=done.simulated_total_s,
    )


@dataclass(frozen=True)
class Job:
    """How to run a cell, and the folder for its file. `run` must be importable: processes receive it by name."""

    run: Callable[[Cell], CellResult]
    folder: CellFolder


OnDone = Callable[[Cell, CellResult], None]
"""Called in this process for every finished cell."""


def run_all(plan: Plan, job: Job, processes: int, on_done: OnDone) -> None:
    """Run all missing cells. No process is left, however this ends.

    Raises:
        Refused: a process ended unexpectedly. Errors of a cell are raised unchanged. Finished cells are kept.
    """
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _initialize)
    try:
        _run_all(executor, plan, job, processes, on_done)
    except BrokenProcessPool as error:
        raise Refused(f"a process that ran a cell ended unexpectedly, possibly out of memory ({error})") from error
    except BaseException:
        # Also for Ctrl-C: running cells take minutes, and nothing would use their results.
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _run_all(executor: ProcessPoolExecutor, plan: Plan, job: Job, processes: int, on_done: OnDone) -> None:
    running: dict[Future[CellResult], Cell] = {}
    while True:
        submitted = {cell.digest for cell in running.values()}
        # Not more cells than processes: the next cells may depend on the results of the running ones.
        for cell in plan.missing():
            if len(running) < processes and cell.digest not in submitted:
                submitted.add(cell.digest)
                running[executor.submit(_run_one, job, cell)] = cell
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            on_done(running.pop(future), future.result())


def _run_one(job: Job, cell: Cell) -> CellResult:
    """In a worker: write the file before the result is reported."""
    result = job.run(cell)
    job.folder.save(cell, result)
    return result


def _initialize() -> None:
    """In a new worker."""
    become_worker()
    keep_freed_memory()
