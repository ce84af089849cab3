"""Processor time and memory of a process and all of its descendants, sampled while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import psutil

GONE = (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError)


class Usage:
    """What a tree of processes has used so far. A process that starts and ends between two samples is not seen."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._cpu: dict[tuple[int, float], float] = {}
        self.peak_bytes = 0
        """Largest sum of the processes' proportional set sizes: a page of several processes is counted once."""

    @property
    def cpu_s(self) -> float:
        """User and system time of all processes that were seen."""
        return sum(self._cpu.values())

    def sample(self, *, memory: bool) -> None:
        """Add what is used now. memory: reading it takes longer."""
        total = 0
        for process in self._tree():
            with suppress(*GONE):
                times = process.cpu_times()
                self._cpu[process.pid, process.create_time()] = times.user + times.system
                total += process.memory_full_info().pss if memory else 0
        self.peak_bytes = max(self.peak_bytes, total)

    def end(self) -> None:
        """Kill the descendants that are left, and the process."""
        for process in self._tree():
            with suppress(*GONE):
                process.kill()

    def _tree(self) -> Iterator[psutil.Process]:
        with suppress(*GONE):
            yield from [*self._root.children(recursive=True), self._root]
