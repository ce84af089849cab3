"""Ends of long commands from outside: SIGTERM and a closed terminal end them as Ctrl-C does, in order."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_signals(left: str) -> Iterator[None]:
    """KeyboardInterrupt for each of these signals; then it says what is left behind."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted: {left}", file=sys.stderr)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
