"""Waiting on the event loop for work that goes on if the one who waits is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import structlog

log = structlog.get_logger()

R = TypeVar("R")


async def shielded(work: Awaitable[R]) -> R:
    """The result of work that is done to its end, also if the caller is cancelled. Its errors go to the caller.

    The error of work whose caller is gone is logged in one line. `asyncio.shield` alone would leave it to the garbage
    collector, which logs it with a traceback as a fault of the program.
    """
    begun = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(begun)  # noqa: TID251 - the one place
    except asyncio.CancelledError:
        begun.add_done_callback(_log_error)
        raise
    finally:
        # An error refers to this frame, and the work to the error: both would stay until the next garbage collection.
        del begun, work


def _log_error(done: asyncio.Future[R]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.warning("failed_after_its_caller_left", error=repr(error))
