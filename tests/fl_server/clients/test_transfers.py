"""Open uploads and downloads, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from typing import Any

import pytest

from fl_server.clients.sessions import Origin, Sessions, Transfer
from fl_server.errors import UnknownSessionError

GONE = RuntimeError("banned")


async def forever() -> None:
    """A message that never arrives."""
    await asyncio.Event().wait()


def opened(*clients: str) -> Sessions:
    """The sessions of these clients."""
    sessions = Sessions()
    for client in clients:
        sessions.open(client, Origin("a process"))
    return sessions


def of(sessions: Sessions, client: str) -> AbstractContextManager[Transfer]:
    """A transfer in the client's session."""
    session = sessions.of(client)
    assert session is not None
    return sessions.transfer(session.id)


async def waiting(sessions: Sessions, client: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A transfer that already waits, and its task."""
    started = asyncio.Event()

    async def take() -> None:
        with of(sessions, client) as transfer:
            started.set()
            return await transfer.unless_ended(work)

    task = asyncio.create_task(take())
    await started.wait()
    await asyncio.sleep(0)
    return task


async def test_a_waiting_transfer_is_ended_at_once() -> None:
    """With the given error, for all transfers of the client and for no other client's."""
    sessions = opened("a", "b")
    first, second, other = [await waiting(sessions, client, forever()) for client in "aab"]
    sessions.end("a", GONE)
    errors = await asyncio.gather(first, second, return_exceptions=True)
    assert list(errors) == [GONE, GONE]
    assert not other.done()
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


async def test_a_busy_transfer_ends_at_its_next_check() -> None:
    """A download checks between two messages."""
    sessions = opened("a")
    with of(sessions, "a") as transfer:
        transfer.check()
        sessions.end("a", GONE)
        with pytest.raises(RuntimeError, match="banned"):
            transfer.check()
        with pytest.raises(RuntimeError, match="banned"):
            await transfer.unless_ended(forever())


async def test_an_ended_transfer_is_not_ended_again() -> None:
    """The call may have moved on to something else, or to another client's work."""
    sessions = opened("a")
    with of(sessions, "a") as transfer:
        assert await transfer.unless_ended(asyncio.sleep(0, "all of it")) == "all of it"
    sessions.end("a", GONE)
    with pytest.raises(UnknownSessionError):
        transfer.check()


async def test_a_cancelled_call_is_no_ban() -> None:
    """A call that its client cancels stays cancelled; the work inside ends with it."""
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await forever()
        finally:
            ended.set()

    task = await waiting(opened("a"), "a", work())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
