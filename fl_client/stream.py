"""The events of one session on one connection, asked for one at a time: a wait that is given up loses none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fl_client.errors import SessionLost, Unreachable
from fl_client.link import Session
from protos.fl.v1 import coordinator_pb2 as pb

FIRST_WORD_S = 60.0
"""Patience with a coordinator that lets a daemon attend and does not greet it."""


async def _at_once() -> None:
    """Nothing is waited for."""


class Stream:
    """An Attend stream, and the connection that it lives on."""

    def __init__(self, session: Session, ready: Callable[[], Awaitable[None]] = _at_once) -> None:
        """ready: waits until the next event may be asked for; meanwhile the coordinator has to wait with it."""
        self.session = session
        self.greeted = False
        """Whether its first event has been taken."""
        self._ready = ready
        self._events = session.connection.attend(session.id)
        self._coming: asyncio.Task[pb.AttendResponse | None] | None = None

    @property
    def coming(self) -> asyncio.Task[pb.AttendResponse | None]:
        """The next event, the same until it is taken; None when the coordinator has ended the stream."""
        if self._coming is None:
            self._coming = asyncio.create_task(self._next())
        return self._coming

    def take(self) -> pb.AttendResponse | None:
        """What has come. Raises the TransportError that came instead."""
        came, self._coming = self.coming, None
        return came.result()

    async def next(self) -> pb.AttendResponse | None:
        """Wait for what comes next, and take it."""
        await asyncio.wait({self.coming})
        return self.take()

    async def begin(self) -> None:
        """Wait for the coordinator's first word; nothing is taken. Raises Unreachable when it does not come."""
        done, _ = await asyncio.wait({self.coming}, timeout=FIRST_WORD_S)
        if not done:
            raise Unreachable(f"expected the coordinator's first word within {FIRST_WORD_S:g} s, got none")

    async def lost(self) -> bool:
        """Whether the coordinator's first word is that it does not know the session; nothing is taken."""
        await self.begin()
        return isinstance(self.coming.exception(), SessionLost)

    async def leave(self) -> None:
        """Close stream and connection when the last call under way there is over."""
        try:
            await self.session.calls.over()
        finally:
            await self.close()

    async def close(self) -> None:
        """Close stream and connection now; calls under way fail."""
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.gather(self._coming, return_exceptions=True)
        await self._events.aclose()
        await self.session.connection.close()

    async def _next(self) -> pb.AttendResponse | None:
        await self._ready()
        return await anext(self._events, None)
