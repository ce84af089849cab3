"""Child processes that never outlive the demo: not its end, not an error, not Ctrl-C, not a SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from fl_ops.errors import Refused

_TAIL_LINES = 12
_LONGEST_LINE = 400


class ChildEnded(Refused):
    """A child is gone that should be there. tail: the last lines that it wrote."""

    def __init__(self, text: str, tail: tuple[str, ...]) -> None:
        super().__init__(text)
        self.tail = tail


@dataclass(frozen=True)
class Child:
    """A running program; all that it prints is in `log`."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


class Processes:
    """The demo's children. A context manager: when its block ends, however it ends, none is left."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, program: str, config: Path) -> Child:
        """Starts `program --config config`, in this folder: a user's own task is found where the demo finds it."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - this interpreter, our own module
                [sys.executable, *_search_path(), "-m", "fl_ops.demo.child", program, "--config", str(config)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A Ctrl-C is for the demo, which then ends its children in its own way.
                start_new_session=True,
                # Many processes share the cores: none of them may start a pool of threads. And each has one heap, as
                # programs ask for themselves, but `fl_ops.demo.child` has a second thread before they can.
                env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
            )
        self._children.append(child := Child(name, process, log))
        return child

    def check(self, wait_s: float = 0.0) -> None:
        """Raises ChildEnded if a child has ended, or does so within `wait_s`."""
        ends = time.monotonic() + wait_s
        while True:
            for child in self._children:
                if child.process.poll() is not None:
                    raise _ended(child)
            if time.monotonic() >= ends:
                return
            time.sleep(0.05)

    def stop(self) -> None:
        """Kills all children: their state is thrown away anyhow, and leaving in order would take them seconds."""
        for child in self._children:
            child.process.kill()
        for child in self._children:
            # Waits, and closes the pipe.
            with child.process:
                pass
        self._children.clear()


def _search_path() -> list[str]:
    """Children find modules where this process does: a `tasks.py` in this folder must not take our package's place."""
    return [] if sys.path[0] in ("", str(Path.cwd())) else ["-P"]


def _ended(child: Child) -> ChildEnded:
    code = child.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    with child.log.open(encoding="utf-8", errors="replace") as lines:
        tail = tuple(line.rstrip()[:_LONGEST_LINE] for line in deque(lines, _TAIL_LINES))
    return ChildEnded(f"{child.name} {how} before the demo was done; its log is {child.log}", tail)
