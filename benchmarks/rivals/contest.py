"""What each system has to do, and the measure that is the same for all of them.

A round is the time from the end of a round to the end of the next one, by the server's clock. The first round is not
counted, because clients still start. Processor time and memory are those of the server's process and its descendants.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.processes import Child, Processes
from benchmarks.usage import Usage

SAMPLE_S = 0.1
MEMORY_EVERY = 3
"""Samples; reading the memory of a process takes longer than its time."""
END_S = 60.0


class Failed(Exception):
    """A system did not do the work; the message has the last lines of its logs."""


@dataclass(frozen=True, slots=True)
class Case:
    """The work. No client trains: each adds a constant to every parameter that it gets."""

    clients: int
    parameters: int
    """float32, in `tensors` tensors."""
    tensors: int
    rounds: int
    """Measured rounds; one more runs before them."""
    limit_s: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where a system runs."""

    folder: Path
    processes: Processes
    stack: ExitStack
    """Ends what the system holds in this process."""
    environments: Path
    """The folder of the virtual environments."""


@dataclass(frozen=True, slots=True)
class Running:
    """A system that has its clients and its run."""

    server: Child
    ends: Callable[[], list[float]]
    """Times since the epoch at which rounds ended, in order, as far as they are known."""
    log: Path
    """Has the reason if the rounds do not come."""


Start = Callable[[Case, Place], Running]
"""Starts a system. Raises Failed and NotInstalled."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a system."""

    round_s: list[float]
    round_s_median: float
    server_cpu_s: float
    """Per round."""
    server_peak_mb: float
    """Largest sum of proportional set sizes, in 2^20 bytes."""


def measure(start: Start, case: Case, folder: Path, environments: Path) -> Measured:
    """Run a system once in an empty folder. Raises Failed and NotInstalled."""
    with Processes(folder) as processes, ExitStack() as stack:
        stack.callback(_end_descendants, processes)
        return _watch(case, start(case, Place(folder, processes, stack, environments)))


def _end_descendants(processes: Processes) -> None:
    """Kill the children and the processes that they have started."""
    for child in processes.children:
        if child.process.poll() is None:
            Usage(child.process.pid).end()


def _watch(case: Case, running: Running) -> Measured:
    if running.server.process.poll() is not None:
        raise Failed(f"the server has ended:\n{last_lines(running.log)}")
    usage, samples = Usage(running.server.process.pid), list[tuple[float, float]]()
    limit = time.monotonic() + case.limit_s
    while len(ends := running.ends()) <= case.rounds or not samples or samples[-1][0] < ends[case.rounds]:
        usage.sample(memory=len(samples) % MEMORY_EVERY == 0)
        samples.append((time.time(), usage.cpu_s))
        if time.monotonic() > limit or running.server.process.poll() is not None:
            raise Failed(f"{len(ends)} of {case.rounds + 1} rounds:\n{last_lines(running.log)}")
        time.sleep(SAMPLE_S)
    ends = ends[: case.rounds + 1]
    seconds = [after - before for before, after in pairwise(ends)]
    cpu_s = cpu_at(samples, ends[-1]) - cpu_at(samples, ends[0])
    return Measured(
        round_s=[round(each, 3) for each in seconds],
        round_s_median=round(statistics.median(seconds), 3),
        server_cpu_s=round(cpu_s / case.rounds, 3),
        server_peak_mb=round(usage.peak_bytes / 2**20, 1),
    )


def cpu_at(samples: list[tuple[float, float]], moment: float) -> float:
    """Processor time at a moment, between the two samples beside it. samples: (time, seconds used), not empty."""
    index = bisect_left(samples, (moment, 0.0))
    if index in (0, len(samples)):
        return samples[min(index, len(samples) - 1)][1]
    (before, used), (after, then) = samples[index - 1], samples[index]
    return used + (then - used) * (moment - before) / (after - before)


def last_lines(log: Path, count: int = 40) -> str:
    """The end of a log; nothing if there is no log yet."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]) if log.exists() else ""


def wait_for(what: str, found: Callable[[], bool], log: Path, limit_s: float = END_S) -> None:
    """Wait until `found` returns true. Raises Failed."""
    limit = time.monotonic() + limit_s
    while not found():
        if time.monotonic() > limit:
            raise Failed(f"{what} did not come in {limit_s:g} s:\n{last_lines(log)}")
        time.sleep(0.2)
