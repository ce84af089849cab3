"""Signals of the process: the first one starts a drain, the second one ends it at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import structlog

log = structlog.get_logger()

EXIT_AT_ONCE = 130


def listen_to_signals(loop: asyncio.AbstractEventLoop, leave: Callable[[], None]) -> None:
    """The first signal starts a drain. The second ends the process at once, even if the event loop is busy."""
    received: list[int] = []

    def on_signal(number: int, _: object) -> None:
        if received:
            leave_at_once("a second signal")
        received.append(number)
        loop.call_soon_threadsafe(leave)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def end_after(grace_s: float) -> threading.Timer:
    """End the process after this time, unless the timer is cancelled before."""
    in_time = threading.Timer(grace_s, leave_at_once, ["the grace is over"])
    in_time.daemon = True
    in_time.start()
    return in_time


def leave_at_once(why: str) -> None:
    """End the process like a crash. Nothing acknowledged is lost."""
    with suppress(RuntimeError):  # the signal may have come in the middle of another line
        log.warning("leaving_at_once", why=why)
    os._exit(EXIT_AT_ONCE)
