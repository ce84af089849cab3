"""The messages of one upload, with limits on the waiting, on the number of chunks, and on uploads read at a time.

`asyncio.timeout` sets and cancels a timer for every message that is waited for. With a thousand uploads that takes a
tenth of the coordinator's time. Nearly all waits end long before their limit, so `TimeLimit` has one timer of the event
loop for all of them, which just stays.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from types import TracebackType
from typing import Self, TypeVar
from weakref import WeakKeyDictionary

from fl_server.errors import InvalidInput
from fl_server.settings.sections import LimitsConfig
from protos.chunks import ReadChunk
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import UpdateTrailer

T = TypeVar("T")
_LEAST_S = 0.01
"""Least time between two checks of all waits."""
_WAITS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Waits] = WeakKeyDictionary()
Request = pb.SubmitUpdateRequest | ReadChunk
"""A message. A chunk may have either form: the parser of `ReadChunk` requires the usual order of its fields."""
Requests = AsyncIterator[Request]
_FREE_CHUNKS = 4096
_LEAST_CHUNK_BYTES = 4096
MOST = 8
"""Slots: twice the threads that write chunks, so that a thread finds the next chunk in memory."""
PATIENCE_S = 0.05
"""A slot is lent to another upload when its holder's client has sent nothing for this time."""


class TimeLimit:
    """`with TimeLimit(seconds):` raises TimeoutError when what is awaited in the block takes longer."""

    __slots__ = ("_before", "_ends", "_expired", "_seconds", "_task", "_waits")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expired = False

    def __enter__(self) -> Self:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is None:
            raise RuntimeError("expected a task that waits")
        self._task, self._before = task, task.cancelling()
        self._ends = loop.time() + self._seconds
        self._waits = _WAITS.get(loop) or _WAITS.setdefault(loop, _Waits())
        self._waits.add(self, self._ends)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._waits.remove(self)
        # As in `asyncio.timeout`: a cancellation from elsewhere is no timeout.
        if self._expired and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        """The time is over: interrupt the wait."""
        self._expired = True
        self._task.cancel()


class _Waits:
    """The open waits of one event loop."""

    def __init__(self) -> None:
        self._ends: dict[TimeLimit, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, wait: TimeLimit, ends: float) -> None:
        self._ends[wait] = ends
        if self._timer is None or ends < self._timer.when():
            self._set_timer(ends)

    def remove(self, wait: TimeLimit) -> None:
        self._ends.pop(wait, None)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._check)

    def _check(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        for wait in [wait for wait, ends in self._ends.items() if ends <= now]:
            del self._ends[wait]
            wait.expire()
        if self._ends:
            self._set_timer(max(min(self._ends.values()), now + _LEAST_S))


class StallTimeout:
    """Ends a stream that is too slow: each `chunk_bytes` may take `stall_s` of waiting, in messages of any size.

    Only waiting for the client counts, not the time that the coordinator's own disk takes.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self.left_s = limits.stall_s
        """Seconds of waiting left until a chunk's worth of bytes must have arrived."""
        self._missing = limits.chunk_bytes

    def __str__(self) -> str:
        return f"less than a chunk of {self._limits.chunk_bytes} bytes came in {self._limits.stall_s:g} s"

    async def wait(self, coming: Awaitable[T]) -> T:
        """Await the next message. Raises TimeoutError when no time is left."""
        began = time.monotonic()
        try:
            with TimeLimit(self.left_s):
                return await coming
        finally:
            self.left_s = max(0.0, self.left_s - (time.monotonic() - began))

    def received(self, count: int) -> None:
        """Count bytes that arrived. A chunk's worth of them restores the whole time."""
        self._missing -= count
        if self._missing <= 0:
            self.left_s, self._missing = self._limits.stall_s, self._limits.chunk_bytes


class ChunkStream:
    """The chunks of one upload, up to its trailer.

    The number of chunks is limited: each costs a write and a note on the disk, however small it is.
    """

    def __init__(self, requests: Requests, size_bytes: int, limits: LimitsConfig) -> None:
        self._requests = requests
        self._most = self._left = _FREE_CHUNKS + size_bytes // _LEAST_CHUNK_BYTES
        self.timeout = StallTimeout(limits)

    async def next(self) -> Request:
        """The next message. Raises TimeoutError when the client is too slow, StopAsyncIteration at the end."""
        return await self.timeout.wait(anext(self._requests))

    def chunk(self, request: Request) -> ReadChunk:
        """Count the chunk in a message and return it. Raises InvalidInput for another part, or one chunk too many."""
        if not self._left:
            raise InvalidInput("chunk", f"{self._most} chunks of an upload at most: send larger ones", "one more")
        self._left -= 1
        chunk = chunk_of(request)
        self.timeout.received(len(chunk.data))
        return chunk


def trailer_of(request: Request) -> UpdateTrailer | None:
    """The trailer in a message; None in another part."""
    return request.trailer if not isinstance(request, ReadChunk) and request.HasField("trailer") else None


def part_of(request: Request | None) -> str:
    """The name of the message's part."""
    if request is None:
        return "nothing"
    return "chunk" if isinstance(request, ReadChunk) else request.WhichOneof("part") or "nothing"


def chunk_of(request: Request) -> ReadChunk:
    """The chunk in a message. Raises InvalidInput for another part."""
    if isinstance(request, ReadChunk):
        return request
    if (part := part_of(request)) != "chunk":
        raise InvalidInput("part", "a chunk or a trailer behind the header", part)
    return ReadChunk(request.chunk.offset, request.chunk.data, request.chunk.crc32c)


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
