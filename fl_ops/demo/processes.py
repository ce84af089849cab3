"""Child processes that never outlive the demo, whether it ends normally, by an error, by Ctrl-C or by SIGKILL."""

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
    """A child has ended unexpectedly. tail: the last lines of its log."""

    def __init__(self, text: str, tail: tuple[str, ...]) -> None:
        super().__init__(text)
        self.tail = tail


@dataclass(frozen=True)
class Child:
    """A running program; its output goes to `log`."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


class Processes:
    """The demo's children; a context manager that kills all of them at its end."""

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
        """Start `program --config config` in the current folder, so that the child finds a user's own task, too."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - this interpreter, our own module
                # -P: a `protos.py` in the current folder hides no package.
                [sys.executable, "-P", "-m", "fl_ops.demo.child", program, "--config", str(config)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C goes to the demo only, which then ends its children.
                start_new_session=True,
                # Many processes share the cores, so each gets one thread. Each gets one heap as well: the programs
                # request this themselves, but too late, because `fl_ops.demo.child` already has a second thread.
                env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
            )
        self._children.append(child := Child(name, process, log))
        return child

    def check(self, wait_s: float = 0.0) -> None:
        """Raises ChildEnded if a child has ended or ends within `wait_s`."""
        ends = time.monotonic() + wait_s
        while True:
            for child in self._children:
                if child.process.poll() is not None:
                    raise _ended(child)
            if time.monotonic() >= ends:
                return
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill all children. Their state is temporary, and an orderly shutdown would take seconds."""
        for child in self._children:
            child.process.kill()
        for child in self._children:
            # Waits, and closes the pipe.
            with child.process:
                pass
        self._children.clear()


def _ended(child: Child) -> ChildEnded:
    code = child.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    with child.log.open(encoding="utf-8", errors="replace") as lines:
        tail = tuple(line.rstrip()[:_LONGEST_LINE] for line in deque(lines, _TAIL_LINES))
    return ChildEnded(f"{child.name} {how} before the demo was done; its log is {child.log}", tail)
