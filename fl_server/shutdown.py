"""Signals of the process: the first one starts a drain, the second one ends it at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
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


async def end_in_time(leaving: asyncio.Event, grace_s: float, leave: Callable[[], Awaitable[None]]) -> None:
    """After the first signal: report not ready with `leave`, and end the process when the grace is over.

    Cancel it when everything is closed.
    """
    await leaving.wait()
    in_time = threading.Timer(grace_s, leave_at_once, ["the grace is over"])
    in_time.daemon = True
    in_time.start()
    try:
        await leave()
        await asyncio.get_running_loop().create_future()
    finally:
        in_time.cancel()


def leave_at_once(why: str) -> None:
    """End the process like a crash. Nothing acknowledged is lost."""
    with suppress(RuntimeError):  # the signal may have come in the middle of another line
        log.warning("leaving_at_once", why=why)
    os._exit(EXIT_AT_ONCE)
