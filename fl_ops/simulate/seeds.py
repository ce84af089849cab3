"""Simulates runs under several seeds, one after the other or in parallel processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

from algorithms import AlgorithmError
from algorithms.batched.choice import WrongStrategy
from fl_common.allocator import keep_freed_memory
from fl_common.program import silence_libraries
from fl_common.units import counted
from fl_ops.errors import OpsError, Refused, UsageError, traceback_of
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.engine_choice import SEQUENTIAL, EngineOptions, make_engine
from fl_ops.simulate.output.results import SeedResult, settings_of, write_end, write_rounds
from fl_ops.simulate.ranks.serving import check_programs, serve
from fl_ops.simulate.reports import Failure, Note, RoundResult, Step
from fl_ops.simulate.saving.save import SAVE_EVERY_S, RunSave
from fl_ops.simulate.settings import SimulationConfig
from fl_ops.simulate.simulation import Simulation
from fl_server.errors import InvalidInput
from fl_tasks import TaskError


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    config: SimulationConfig
    seed: int
    folder: Path | None
    """The folder for its files and its save; None: no files are written."""
    engine: EngineOptions = SEQUENTIAL
    continues: bool = False
    """Whether the run continues from the save in its folder, if there is one."""
    save_every_s: float = SAVE_EVERY_S
    """See `RunSave`."""


Report = tuple[int, RoundResult | Step | Failure | Note] | SeedResult | OpsError
"""(seed, committed round, begun step, failure of a client or note), the result of a run that has ended, or the error
that ended it."""
OnReport = Callable[[Report], None]

WRITE_EVERY_S = 1.0
"""Seconds between two writings of all rounds: of thousands of rounds each takes as long as a short round."""
SAVED = "saved"
"""The folder of a run's save, in its folder."""
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def simulate(job: Job, on_report: OnReport) -> None:
    """Simulate one run in this process. An interrupted run also writes its files.

    On a rank other than 0: do that rank's share, and report nothing.

    Raises:
        UsageError: the configuration, the task or the data are invalid.
            There is the save of a run that has not ended, and this one does not continue it.
        Refused: the task's code failed during the run, a file cannot be written, or the save cannot be continued.
    """
    with ExitStack() as stack:
        with as_usage_errors():
            prepared = prepare(job.config, job.seed)
            if job.engine.ranks is not None:
                check_programs(job.engine.ranks, prepared)
                if job.engine.ranks.rank:
                    serve(job.engine.ranks, prepared, partial(make_engine, job.engine))
                    return
            simulation = Simulation(
                prepared.config,
                prepared.clients,
                task=prepared.server_task,
                notify=lambda what: on_report((job.seed, what)),
                engine=job.engine,
                devices=prepared.devices,
                digests=job.config.simulation.digests,
                measure=job.config.simulation.measure,
            )
            stack.enter_context(simulation)
            settings = settings_of(job.config, prepared, simulation)  # loads the first client's data
        if job.engine.batched is not None:  # all other engines have the same bits
            settings["engine"] = job.engine.arithmetic
        result = SeedResult(job.seed, settings)
        _run(job, simulation, result, on_report)
    on_report(result)


def _run(job: Job, simulation: Simulation, result: SeedResult, on_report: OnReport) -> None:
    """Simulate to the end, and write the files of what there is then."""
    with ExitStack() as stack:
        rounds = stack.enter_context(closing(_rounds(simulation, _opened(job, result, simulation, stack), result)))
        if result.rounds:
            on_report((job.seed, Note(f"continues after {counted(len(result.rounds), 'round')}")))
        due = 0.0
        try:
            for round_ in rounds:
                result.rounds.append(round_)
                if job.folder and time.monotonic() >= due:
                    write_rounds(job.folder, result.rounds)
                    due = time.monotonic() + WRITE_EVERY_S
                on_report((job.seed, round_))
            with _task_errors():
                simulation.with_last_measures(result.rounds)
        finally:
            result.profile, result.model = simulation.profile(), simulation.federation.digest
            result.status, result.reason = simulation.ending or (
                "interrupted",
                f"after {counted(len(result.rounds), 'round')}",
            )
            if job.folder:
                write_end(job.folder, result, simulation.model(), simulation.averaged_model())


def _opened(job: Job, result: SeedResult, simulation: Simulation, stack: ExitStack) -> RunSave | None:
    """The save in the run's folder, until the stack ends. A continued run is put where it is, with its results."""
    if job.folder is None:
        return None
    settings = {**result.settings, "engine": job.engine.arithmetic}
    save = stack.enter_context(RunSave(job.folder / SAVED, settings, job.save_every_s))
    if job.continues:
        result.rounds = save.restore(simulation)
    else:
        save.begin()
    return save


def _rounds(simulation: Simulation, save: RunSave | None, result: SeedResult) -> Generator[RoundResult]:
    with _task_errors():
        yield from save.rounds(simulation, result.rounds) if save else simulation.rounds()


@contextmanager
def _task_errors() -> Iterator[None]:
    """Turn errors of a run that is under way into those of the command."""
    try:
        yield
    except WrongStrategy as error:
        raise UsageError(str(error)) from error
    except TaskError as error:
        raise Refused(str(error)) from error


@contextmanager
def as_usage_errors() -> Iterator[None]:
    """Turn errors of a configuration or its data into UsageError."""
    try:
        yield
    except (TaskError, AlgorithmError, InvalidInput) as error:
        raise UsageError(str(error)) from error


def simulate_all(jobs: Sequence[Job], processes: int, on_report: OnReport) -> None:
    """Simulate all runs, at most `processes` at a time. Raises the errors of `simulate` after all runs have ended."""
    if min(processes, len(jobs)) == 1:
        with interruptible():
            for job in jobs:
                simulate(job, on_report)
        return
    _ProcessPool(on_report).run(jobs, processes)


class _ProcessPool:
    """One process for each run."""

    def __init__(self, on_report: OnReport) -> None:
        self._on_report = on_report
        self._context = get_context("spawn")
        self._running: dict[Connection, SpawnProcess] = {}

    def run(self, jobs: Sequence[Job], processes: int) -> None:
        waiting = list(jobs)
        try:
            while waiting or self._running:
                while waiting and len(self._running) < processes:
                    self._start(waiting.pop(0))
                ready = wait(list(self._running))
                for connection in [running for running in self._running if running in ready]:
                    self._receive(connection)
        finally:
            self._interrupt_all()

    def _start(self, job: Job) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_child, args=(job, theirs), name=f"seed-{job.seed}")
        # Block signals until the child can handle them: an interrupted child writes its files.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._running[ours] = process

    def _receive(self, connection: Connection) -> None:
        try:
            report: Report = connection.recv()
        except EOFError:
            process = self._running.pop(connection)
            process.join()
            if process.exitcode:
                raise Refused(f"the process of {process.name} ended with exit code {process.exitcode}") from None
            return
        if isinstance(report, OpsError):
            raise report
        self._on_report(report)

    def _interrupt_all(self) -> None:
        """Interrupt the processes that still run; each writes its files."""
        for process in self._running.values():
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)
        for process in self._running.values():
            process.join()


def _child(job: Job, connection: Connection) -> None:
    with suppress(KeyboardInterrupt, BrokenPipeError), interruptible():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _END_SIGNALS)
        keep_freed_memory()
        silence_libraries()
        try:
            simulate(job, connection.send)
        except OpsError as error:
            error.trace = traceback_of(error)  # the cause does not go through the pipe
            connection.send(error)


@contextmanager
def interruptible() -> Iterator[None]:
    """The first Ctrl-C or SIGTERM raises KeyboardInterrupt; later ones are ignored, so that files are written."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in _END_SIGNALS}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
