"""Limits the uploads that have a chunk in memory at once, without making any of them wait for a slow link.

Messages that no upload asks for wait in the transport, which keeps little for each stream and then stops its sender.
A message that was asked for takes several times its size until it is on the disk.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

MOST = 8
"""Slots: twice the threads that write chunks, so that a thread finds the next chunk in memory."""
PATIENCE_S = 0.05
"""A slot is lent to another upload when its holder's client has sent nothing for this time."""


class ReadSlots:
    """The slots of all uploads, given in the order of the requests. Lives on the event loop.

    An upload that waits for its client longer than the patience loses its slot, and needs none for the message when it
    comes. So silent clients delay others by the patience at most, and a slow link's chunks are written as they come.
    """

    def __init__(self, most: int = MOST, patience_s: float = PATIENCE_S) -> None:
        self.free = most
        """Slots without a holder."""
        self._patience_s = patience_s
        self._requests: deque[asyncio.Future[None]] = deque()
        self._silent: dict[ReadTurn, float] = {}
        """Holders whose message has not come, with the time since when they wait; the longest wait is first."""
        self._timer: asyncio.TimerHandle | None = None

    def turn(self) -> ReadTurn:
        """The reading and writing of one chunk."""
        return ReadTurn(self)

    async def take(self, turn: ReadTurn) -> None:
        """Wait for a slot."""
        loop = asyncio.get_running_loop()
        if self.free:
            self.free -= 1
        else:
            request: asyncio.Future[None] = loop.create_future()
            self._requests.append(request)
            self._watch()
            try:
                await request
            except asyncio.CancelledError:
                if not request.cancelled():  # the slot came together with the cancellation
                    self.give()
                raise
        self._silent[turn] = loop.time()
        self._watch()

    def received(self, turn: ReadTurn) -> None:
        """The turn's message has come, or will not come."""
        self._silent.pop(turn, None)

    def give(self) -> None:
        """Pass a slot on."""
        while self._requests:
            request = self._requests.popleft()
            if not request.done():
                request.set_result(None)
                return
        self.free += 1

    def _watch(self) -> None:
        if self._timer is None and self._requests and self._silent:
            ends = next(iter(self._silent.values())) + self._patience_s
            self._timer = asyncio.get_running_loop().call_at(ends, self._lend)

    def _lend(self) -> None:
        """Pass on the slots of the turns that have waited too long for their clients."""
        self._timer, now = None, asyncio.get_running_loop().time()
        for turn, since in list(self._silent.items()):
            if not self._requests or since + self._patience_s > now:
                break
            del self._silent[turn]
            turn.holds = False
            self.give()
        self._watch()


class ReadTurn:
    """`async with slots.turn() as turn:` one chunk is awaited, which `turn.received()` reports, and written."""

    __slots__ = ("_slots", "holds")

    def __init__(self, slots: ReadSlots) -> None:
        self._slots = slots
        self.holds = False
        """Whether the turn has a slot."""

    def received(self) -> None:
        """The message has come."""
        self._slots.received(self)

    async def __aenter__(self) -> Self:
        await self._slots.take(self)
        self.holds = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._slots.received(self)
        if self.holds:
            self.holds = False
            self._slots.give()
