"""Programs of ours in processes forked from one that has torch and grpc imported already.

What runs is the program, from its `__main__` on: its own process, environment, folder and files, and signals end it as
they would any other. Only the two to three seconds in which each of hundreds of processes would import the same modules
are spent once. The server that forks is the standard library's, one for each process that runs tests.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PRELOADED = ("fl_server.app", "fl_client.app")


@dataclass(frozen=True)
class Program:
    """What `python -m MODULE ARGUMENTS` would be started with."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    out: Path
    err: Path
    open_files: int | None = None
    """How many it may have open; None: as many as whoever starts it."""


class Forked:
    """A program that runs; as `subprocess.Popen` has it."""

    def __init__(self, program: Program) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *PRELOADED])
        self._process = context.Process(target=_run, args=(program,), daemon=True)
        # The children of the forking server inherit its environment, and OpenMP reads its own once.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit code, once it has ended. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """To this process alone; nothing happens when it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(program: Program) -> None:
    """Become the program: in the child."""
    for path, stream in ((program.out, 1), (program.err, 2)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    if program.open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (program.open_files, program.open_files))
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.environment)
    sys.path[:0] = program.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = [program.module, *program.arguments]
    runpy.run_module(program.module, run_name="__main__", alter_sys=True)
