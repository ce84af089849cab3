"""Child processes that never outlive the demo, whether it ends normally, by an error, by Ctrl-C or by SIGKILL."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import deque
from dataclasses import dataclass
from multiprocessing import connection, forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Self

from fl_ops.demo import child
from fl_ops.errors import Refused

_LONGEST_FOLDER = 70
"""Bytes of a folder in which the name of a socket fits, with the two names that multiprocessing adds."""
_TAIL_LINES = 12
_LONGEST_LINE = 400
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "PYTHONSAFEPATH": "1"}
"""The environment of the children. Many processes share the cores, so each gets one thread and one heap: the programs
request this themselves, but too late, because a child already has a second thread. With the safe path, a `protos.py`
in the current folder hides no package.
"""


class ChildEnded(Refused):
    """A child has ended unexpectedly. tail: the last lines of its log."""

    def __init__(self, text: str, tail: tuple[str, ...]) -> None:
        super().__init__(text)
        self.tail = tail


@dataclass(frozen=True)
class Child:
    """A running program; its output goes to `log`."""

    name: str
    process: BaseProcess
    log: Path


class Processes:
    """The demo's children; a context manager that kills all of them at its end.

    They are forked from one process that has imported the programs: each shares its memory and starts in milliseconds.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["fl_ops.demo.programs"])

    def __enter__(self) -> Self:
        before, folder = os.environ.copy(), tempfile.tempdir
        os.environ.update(_ENVIRONMENT)
        if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER:
            tempfile.tempdir = "/tmp"  # noqa: S108 - multiprocessing makes a folder of its own in it
        try:
            forkserver.ensure_running()
        finally:
            tempfile.tempdir = folder
            os.environ.clear()
            os.environ.update(before)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, program: str, config: Path) -> Child:
        """Start `program --config config` in the current folder, so that the child finds a user's own task, too."""
        log = self._logs / f"{name}.log"
        log.touch()
        process = self._context.Process(target=child.run, args=(program, config, log), name=name)
        process.start()
        self._children.append(started := Child(name, process, log))
        return started

    def check(self, wait_s: float = 0.0) -> None:
        """Raises ChildEnded if a child has ended or ends within `wait_s`."""
        if all(started.process.exitcode is None for started in self._children):
            connection.wait([started.process.sentinel for started in self._children], wait_s)
        for started in self._children:
            if started.process.exitcode is not None:
                raise _ended(started)

    def kill(self, child: Child) -> None:
        """End one child by SIGKILL; its end is expected from then on."""
        self._children.remove(child)
        child.process.kill()
        child.process.join()

    def stop(self) -> None:
        """Kill all children. Their state is temporary, and an orderly shutdown would take seconds."""
        for started in self._children:
            started.process.kill()
        for started in self._children:
            started.process.join()
        self._children.clear()


def _ended(started: Child) -> ChildEnded:
    code = started.process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    with started.log.open(encoding="utf-8", errors="replace") as lines:
        tail = tuple(line.rstrip()[:_LONGEST_LINE] for line in deque(lines, _TAIL_LINES))
    return ChildEnded(f"{started.name} {how} before the demo was done; its log is {started.log}", tail)
