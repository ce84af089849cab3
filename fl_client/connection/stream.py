"""The events of one session on one connection, requested one at a time. A cancelled wait loses no event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fl_client.connection.link import Session
from fl_client.errors import SessionLost, Unreachable
from protos.fl.v1 import coordinator_pb2 as pb

FIRST_EVENT_S = 60.0
"""Longest wait for the first event of a stream."""


async def _at_once() -> None:
    """Wait for nothing."""


class EventStream:
    """An Attend stream and its connection."""

    def __init__(self, session: Session, ready: Callable[[], Awaitable[None]] = _at_once) -> None:
        """ready: waits until the next event may be requested. The coordinator's send blocks meanwhile."""
        self.session = session
        self.attached = False
        """Whether its first event has been taken."""
        self._ready = ready
        self._events = session.connection.attend(session.id)
        self._next_event: asyncio.Task[pb.AttendResponse | None] | None = None

    @property
    def next_event(self) -> asyncio.Task[pb.AttendResponse | None]:
        """The next event, the same until it is taken. None when the coordinator has ended the stream."""
        if self._next_event is None:
            self._next_event = asyncio.create_task(self._request())
        return self._next_event

    def take(self) -> pb.AttendResponse | None:
        """Take the event that has arrived. Raises the TransportError that arrived instead."""
        arrived, self._next_event = self.next_event, None
        return arrived.result()

    async def next(self) -> pb.AttendResponse | None:
        """Wait for the next event, and take it."""
        await asyncio.wait({self.next_event})
        return self.take()

    async def wait_for_first(self) -> None:
        """Wait for the first event without taking it. Raises Unreachable when it does not arrive in time."""
        done, _ = await asyncio.wait({self.next_event}, timeout=FIRST_EVENT_S)
        if not done:
            raise Unreachable(f"expected the coordinator's first event within {FIRST_EVENT_S:g} s, got none")

    async def session_is_lost(self) -> bool:
        """Whether the coordinator's first answer is that it does not know the session. No event is taken."""
        await self.wait_for_first()
        return isinstance(self.next_event.exception(), SessionLost)

    async def close_after_calls(self) -> None:
        """Close stream and connection when the calls in progress have finished."""
        try:
            await self.session.calls.finished()
        finally:
            await self.close()

    async def close(self) -> None:
        """Close stream and connection now. Calls in progress fail."""
        if self._next_event is not None:
            self._next_event.cancel()
            await asyncio.gather(self._next_event, return_exceptions=True)
        await self._events.aclose()
        await self.session.connection.close()

    async def _request(self) -> pb.AttendResponse | None:
        await self._ready()
        return await anext(self._events, None)
