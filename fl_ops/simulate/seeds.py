"""Runs under several seeds, one after the other or side by side in processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

from algorithms import AlgorithmError
from fl_client.allocator import keep_freed_memory
from fl_ops.errors import Misused, OpsError, Refused
from fl_ops.simulate.clients import deal
from fl_ops.simulate.results import SeedResult, settings_of, write_end, write_rounds
from fl_ops.simulate.settings import Plan
from fl_ops.simulate.simulation import RoundResult, Simulation
from fl_server.errors import InvalidInput
from tasks import TaskError


@dataclass(frozen=True, slots=True)
class Job:
    """One run. folder: where its files go, if they go anywhere."""

    plan: Plan
    seed: int
    folder: Path | None


Told = tuple[int, RoundResult] | SeedResult | OpsError
"""(seed, a round that is done), the whole when it has ended, or why it could not go on."""
Tell = Callable[[Told], None]

_ENDING = (signal.SIGINT, signal.SIGTERM)


def simulate(job: Job, tell: Tell) -> None:
    """Do one run to its end, in this process; what is done is written also when it is interrupted.

    Raises:
        Misused: the configuration, the task or the data are not as they must be.
        Refused: the task's code failed on the way, or a file cannot be written.
    """
    with in_words():
        dealt = deal(job.plan, job.seed)
        simulation = Simulation(dealt.config, dealt.clients, task=dealt.evaluated)
    with simulation:
        result = SeedResult(job.seed, settings_of(job.plan, dealt, simulation))
        try:
            for each in _rounds(simulation):
                result.rounds.append(each)
                if job.folder:
                    write_rounds(job.folder, result.rounds)
                tell((job.seed, each))
        finally:
            result.status, result.reason = simulation.ending or ("interrupted", f"after {len(result.rounds)} rounds")
            if job.folder:
                write_end(job.folder, result, simulation.model())
        tell(result)


def _rounds(simulation: Simulation) -> Iterator[RoundResult]:
    try:
        yield from simulation.rounds()
    except TaskError as error:
        raise Refused(str(error)) from error


@contextmanager
def in_words() -> Iterator[None]:
    """What is wrong with a configuration or its data, as an operator's error."""
    try:
        yield
    except (TaskError, AlgorithmError, InvalidInput) as error:
        raise Misused(str(error)) from error


def simulate_all(jobs: Sequence[Job], processes: int, tell: Tell) -> None:
    """All runs, at most so many at a time. Raises what `simulate` raises, once the others have been ended too."""
    if min(processes, len(jobs)) == 1:
        with interruptible():
            for job in jobs:
                simulate(job, tell)
        return
    _Children(tell).run(jobs, processes)


class _Children:
    """Processes that do a run each."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._context = get_context("spawn")
        self._running: dict[Connection, SpawnProcess] = {}

    def run(self, jobs: Sequence[Job], processes: int) -> None:
        waiting = list(jobs)
        try:
            while waiting or self._running:
                while waiting and len(self._running) < processes:
                    self._start(waiting.pop(0))
                ready = wait(list(self._running))
                for connection in [each for each in self._running if each in ready]:
                    self._hear(connection)
        finally:
            self._end()

    def _start(self, job: Job) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_child, args=(job, theirs), name=f"seed-{job.seed}")
        # Until it can write down what it has done, it must not be interrupted.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._running[ours] = process

    def _hear(self, connection: Connection) -> None:
        try:
            told: Told = connection.recv()
        except EOFError:
            process = self._running.pop(connection)
            process.join()
            if process.exitcode:
                raise Refused(f"the process of {process.name} ended with exit code {process.exitcode}") from None
            return
        if isinstance(told, OpsError):
            raise told
        self._tell(told)

    def _end(self) -> None:
        """Interrupt what still runs: each writes down what it has done."""
        for process in self._running.values():
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)
        for process in self._running.values():
            process.join()


def _child(job: Job, connection: Connection) -> None:
    with suppress(KeyboardInterrupt, BrokenPipeError), interruptible():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        keep_freed_memory()
        try:
            simulate(job, connection.send)
        except OpsError as error:
            connection.send(error)


@contextmanager
def interruptible() -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the work in order; more of them do not keep it from writing what it has."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in _ENDING}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
