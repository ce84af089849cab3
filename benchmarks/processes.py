"""Coordinators and daemons as processes of their own, started as users start them; none outlives the benchmark.

The demo forks its processes from one that has imported the programs, so that their memory is shared. A benchmark
measures what a program needs by itself.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class Child:
    """A running program; its output goes to `log`."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


class Processes:
    """The children of a benchmark; a context manager that kills all of them at its end."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children:
            child.process.kill()
        for child in self.children:
            with child.process:  # waits, and closes the pipe
                pass

    def start(self, name: str, program: str, config: Path, *more: str) -> Child:
        """Start `python -m program --config config MORE`, which finds the benchmarks' own tasks."""
        found = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-P", __file__, program, "--config", str(config), *more]
        return self.run(name, command, {"PYTHONPATH": found})

    def run(
        self, name: str, command: list[str], environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> Child:
        """Start a command with one thread and one heap. environment: added to this process's. folder: to run in."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - the benchmark's own command
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes to the benchmark only, which then ends its children
                env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", **(environment or {})},
                cwd=folder,
            )
        self.children.append(child := Child(name, process, log))
        return child


def _end_with_parent() -> None:
    """The parent keeps the other end of stdin open and never writes: the read returns when the parent has ended."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
