"""A program in a pseudo terminal, and the screen that a person would see."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pyte

from tests.processes.forks import Forked, Program
from tests.processes.process import ROOT, TIMEOUT_S

_ALTERNATE = "\x1b[?1049h"


class Terminal:
    """`fl` with these arguments in a terminal of this size; a context manager that ends it."""

    def __init__(self, arguments: Sequence[str], folder: Path, columns: int = 80, lines: int = 24) -> None:
        self._arguments, self._folder = list(arguments), folder
        self.columns, self.lines = columns, lines
        self.sent = ""
        """All that the program has written."""

    def __enter__(self) -> Self:
        self._screen = pyte.Screen(self.columns, self.lines)
        self._stream = pyte.Stream(self._screen)
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", self.lines, self.columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        environment = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES", "NO_COLOR"}}
        environment = {**environment, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
        terminal = Path(os.ttyname(theirs))
        self.process = Forked(
            Program("fl_ops", self._arguments, environment, self._folder, terminal, terminal, terminal=terminal)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        os.close(self._ours)
        os.close(self._theirs)

    def type(self, keys: str) -> None:
        """Send keys."""
        os.write(self._ours, keys.encode())

    def shows(self, *texts: str) -> str:
        """Wait until all texts are on the screen; returns the screen."""
        until = time.monotonic() + TIMEOUT_S
        while not all(text in self.screen for text in texts):
            assert time.monotonic() < until, f"expected {texts} on the screen, got\n{self.screen}"
            code = self.process.poll()
            if not self._read(0.2):
                assert code is None, f"ended with {code}:\n{self.screen}"
        return self.screen

    def ends(self) -> int:
        """Wait for the end of the program; returns its exit code."""
        until = time.monotonic() + TIMEOUT_S
        while (code := self.process.poll()) is None:
            self._read(0.1)
            assert time.monotonic() < until, f"it still runs:\n{self.screen}"
        while self._read(0.1):
            pass
        return code

    @property
    def screen(self) -> str:
        """The lines of the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    def is_as_before(self) -> bool:
        """Whether keys are read as before, the cursor is shown, and the screen is the shell's again."""
        settings: list[Any] = termios.tcgetattr(self._theirs)
        shown = self.sent.rfind("\x1b[?25h") > self.sent.rfind("\x1b[?25l")
        return settings == self.before and shown and self.sent.rfind("\x1b[?1049l") >= self.sent.rfind(_ALTERNATE)

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], seconds)
        if ready:
            text = os.read(self._ours, 1 << 16).decode(errors="replace")
            self.sent += text
            self._stream.feed(text)
        return bool(ready)
