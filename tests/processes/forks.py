"""Our programs in processes forked from one that has already imported torch and grpc.

Each program runs from its `__main__` on in its own process, with its own environment, folder, files and signals. Only
the imports, which take two to three seconds, are done once. All processes that run tests share one forkserver of the
standard library.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from fl_common.certificates.tls_version import set_oldest_tls
from fl_ops.worker_process import end_with_parent

# As a program does it, before grpc is imported: in the tests' own process, and in the forkserver.
set_oldest_tls("1.3")

ROOT = Path(__file__).parents[2]
HEAVY = ("torch._dynamo", "dp_accounting.pld")
"""What few runs need, and takes a second or two each.

torch's compiler is for the steps of DP-SGD and for optimizers of torch; the other one is the second accountant.
"""


SHARED = "IMPETUS_TESTS_FORKSERVER"
"""Environment variable with the socket of the forkserver."""


def import_heavy() -> None:
    """Import them for all processes that are forked from this one."""
    for name in HEAVY:
        with suppress(ModuleNotFoundError):  # an extra that is not installed
            importlib.import_module(name)


def start() -> None:
    """Start the forkserver of this process and of the test processes that it starts, or use that of their parent.

    It imports the modules in the background.
    It finds this module only from the repository's folder. If a test in another folder started it, grpc would be
    imported before the oldest TLS version is set, and no program could be forked.
    """
    context()
    server: Any = forkserver._forkserver  # the standard library shares it with children of its own alone
    if address := os.environ.get(SHARED):
        server._forkserver_address = address
        server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)  # it ends with the process that started it
        server.ensure_running = forkserver.ensure_running = resource_tracker.ensure_running
        server.ensure_running()
        return
    with chdir(ROOT):
        forkserver.ensure_running()
    os.environ[SHARED] = server._forkserver_address


def end() -> None:
    """End the forkserver that this process has started, also while it imports: torch makes a folder for itself then."""
    server: Any = forkserver._forkserver
    if (pid := server._forkserver_pid) is not None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def context() -> ForkServerContext:
    """The forkserver of this process, with the preloaded modules."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.processes.preloaded"])
    # Children inherit the forkserver's environment, and OpenMP reads its variables once.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return made


@dataclass(frozen=True)
class Program:
    """A program as `python -m MODULE ARGUMENTS` starts it."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    out: Path
    err: Path
    open_files: int | None = None
    """Limit of open files; None for the parent's limit."""
    terminal: Path | None = None
    """The terminal of a session of its own; it replaces `out` and `err`, and is the input too."""


class Forked:
    """A running program, with the methods of `subprocess.Popen`."""

    def __init__(self, program: Program) -> None:
        self._process = context().Process(target=_run, args=(program,), daemon=True)
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
        """Wait for the end; returns the exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to this process; no effect after its end."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(program: Program) -> None:
    """Run the program in the child."""
    end_with_parent()
    # The program may start processes, as it may when it has an interpreter of its own.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    if program.terminal is not None:
        _enter(program.terminal)
    else:
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


def _enter(terminal: Path) -> None:
    """Make it the terminal of this process, so that Ctrl-C is a signal."""
    os.setsid()
    descriptor = os.open(terminal, os.O_RDWR)  # a session without a terminal gets the first one that it opens
    for stream in range(3):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = (open(each, mode, closefd=False) for each, mode in enumerate("rww"))  # noqa: SIM115
