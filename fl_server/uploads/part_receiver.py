"""Receives the bytes of updates: messages, chunks into a part file, its check as a whole, its final name.

The same code runs in the coordinator and in a worker, which asks the coordinator. What may be received, and what
becomes of it, is decided by the `OpenUpload` that it is given. The waiting, the number of chunks and the uploads that
are read at a time have limits.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar

from fl_server.admission.reading import UpdateContent
from fl_server.clients.transfer_limits import Excess, TransferLimits
from fl_server.errors import InvalidInput, NotNow, ServerError, UploadBroken
from fl_server.metrics import Metrics
from fl_server.settings.config import ServerConfig
from fl_server.settings.sections import LimitsConfig
from fl_server.store.errors import StoreError
from fl_server.store.spool.part_file import PartBusy, PartFile
from fl_server.store.spool.spool import Spool, SpoolKey, TooManyUnfinished
from fl_server.timeouts import TimeLimit
from protos.chunks import ChunkError, ReadChunk, check_chunk
from protos.codec import digest_bytes
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey, Receipt, UpdateHeader, UpdateTrailer
from protos.wire import MAX_CHUNK_BYTES

T = TypeVar("T")
Request = pb.SubmitUpdateRequest | ReadChunk
"""A message. A chunk may have either form: the parser of `ReadChunk` requires the usual order of its fields."""
Requests = AsyncIterator[Request]

_FREE_CHUNKS = 4096
_LEAST_CHUNK_BYTES = 4096


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


P = ParamSpec("P")
R = TypeVar("R")
BUSY_WAIT_S = 1.0
"""Retry wait of a client that has an older stream of the same update open: that stream may be dead, unnoticed yet."""


class Decided(Exception):
    """The coordinator has decided about the update: its client needs not send the rest."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__(receipt.detail)
        self.receipt = receipt

    def keeps(self, header: UpdateHeader) -> bool:
        """Whether the bytes of an upload with this header are those of an admitted update."""
        return self.receipt.admitted and self.receipt.digest == header.digest


class OpenUpload(Protocol):
    """One upload whose header is accepted. The coordinator has one for its own uploads, a worker asks the coordinator.

    Each method may raise the error that ended the upload, or Decided.
    """

    @property
    def header(self) -> UpdateHeader:
        """Its header."""
        ...

    @property
    def client(self) -> str:
        """Who sends it."""
        ...

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that may wait long for the client. Raises as soon as the upload is ended from outside."""
        ...

    def check(self) -> None:
        """Raise if the client may not go on."""
        ...

    def wrote(self, count: int) -> None:
        """So many bytes more are on the disk."""
        ...

    async def advance(self, count: int) -> None:
        """So many bytes more have come. Returns when the next ones may come."""
        ...

    def read(self, path: Path) -> UpdateContent:
        """Read the whole file for `check_content`. Blocking. Raises StoreError."""
        ...

    async def check_content(self, content: UpdateContent, path: Path) -> None:
        """Have the update checked before it gets its final name. Raises UploadBroken, if other bytes may come."""
        ...

    async def admit(self) -> Receipt:
        """Have the update counted, which is whole under its final name."""
        ...

    async def failed(self, error: StoreError) -> Receipt:
        """The file of the upload cannot be used. Returns the receipt if that does not matter any more, else raises."""
        ...


@dataclass(frozen=True, slots=True)
class Disk:
    """Where a process puts the bytes of uploads, and with which threads."""

    config: ServerConfig
    spool: Spool
    metrics: Metrics
    io: ThreadPoolExecutor
    limits: TransferLimits
    """They have each client's share of the threads."""

    async def in_io(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run work on an upload's file outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.io, lambda: function(*args, **kwargs))

    async def of_client(self, client: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The same in the client's share of the threads."""
        async with self.limits.of(client).share:
            return await self.in_io(function, *args, **kwargs)


class PartReceiver:
    """Receives uploads of one process. Lives on the event loop."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._slots = ReadSlots()

    async def receive(self, upload: OpenUpload, requests: Requests) -> Receipt:
        """Receive the bytes behind a header; returns the receipt. Raises the error that ended the transfer."""
        try:
            part = await self._open(upload)
        except StoreError as error:
            return await upload.failed(error)
        gauge = self._disk.metrics.uploads_in_flight
        gauge.inc(upload.header.size_bytes)
        try:
            return await self._received(upload, part, requests)
        except Decided as decided:
            if not decided.keeps(upload.header):  # else an older stream of the update was admitted, with this file
                await self._disk.in_io(part.discard)
            return decided.receipt
        except StoreError as error:
            receipt = await upload.failed(error)
            if not Decided(receipt).keeps(upload.header):
                await self._disk.in_io(part.discard)
            return receipt
        except ServerError as error:
            if error.forbids:
                await self._disk.in_io(part.discard)
            raise
        finally:
            gauge.dec(upload.header.size_bytes)
            await self._close(part)

    async def _received(self, upload: OpenUpload, part: PartFile, requests: Requests) -> Receipt:
        header = upload.header
        trailer = await upload.unless_ended(self._write_chunks(upload, part, requests))
        if trailer.size_bytes != header.size_bytes or part.kept_bytes != header.size_bytes:
            raise _broken(upload, part, f"the upload ended short of {header.size_bytes} bytes")
        content = await self._disk.of_client(upload.client, upload.read, part.path)
        try:
            await upload.check_content(content, part.path)
        except UploadBroken as broken:
            if not broken.kept_bytes:
                await self._disk.in_io(part.discard)
            raise
        # Not in the threads of `seal`: a slow object store would hold up all other uploads.
        await asyncio.gather(*map(asyncio.wrap_future, part.sending), return_exceptions=True)
        await self._disk.in_io(part.seal)
        return await upload.admit()

    async def _open(self, upload: OpenUpload) -> PartFile:
        """The part file. Raises UploadBroken if the sender starts behind the bytes kept, NotNow if it is in use."""
        header, client = upload.header, upload.client
        digest, key = digest_bytes(header.digest), spool_key(header.key, client)
        opening = asyncio.ensure_future(
            self._disk.of_client(client, self._disk.spool.open_part, key, digest, header.size_bytes)
        )
        try:
            part = await asyncio.shield(opening)
        except PartBusy as busy:
            raise NotNow("an older stream of this update is still open", BUSY_WAIT_S) from busy
        except TooManyUnfinished as held:
            raise too_many_kept(self._disk.config, self._disk.limits, client) from held
        except asyncio.CancelledError:
            # The thread opens the file anyway. Left open, it would block every later writer.
            opening.add_done_callback(_close_unused)
            raise
        if header.resume_offset > part.kept_bytes:
            kept = part.kept_bytes
            await self._close(part)
            raise UploadBroken(header.key, kept, f"expected a start at {kept} or before, got {header.resume_offset}")
        return part

    async def _close(self, part: PartFile) -> None:
        """Close a part file, also when the stream is cut meanwhile: left open, it would block every later writer."""
        if not part.closed:
            await asyncio.shield(self._disk.in_io(part.close))

    async def _write_chunks(self, upload: OpenUpload, part: PartFile, requests: Requests) -> UpdateTrailer:
        """Write chunks until the trailer. Raises UploadBroken, NotNow, Decided."""
        offset = upload.header.resume_offset
        stream = ChunkStream(requests, upload.header.size_bytes, self._disk.config.limits)
        while True:
            async with self._slots.turn() as turn:
                request = await _next(stream, upload, part)
                turn.received()
                upload.check()
                if (trailer := trailer_of(request)) is not None:
                    return trailer
                chunk = stream.chunk(request)
                await self._write(upload, part, chunk, offset)
                count = len(chunk.data)
                del request, chunk  # their memory is free before the next one comes
            offset += count
            await upload.advance(count)

    async def _write(self, upload: OpenUpload, part: PartFile, chunk: ReadChunk, offset: int) -> None:
        """Write a chunk, and count it once it is written, also when the stream is cut while a thread writes it."""

        def count(writing: asyncio.Future[None]) -> None:
            if not writing.cancelled() and writing.exception() is None:
                upload.wrote(len(chunk.data))

        writing = asyncio.ensure_future(self._disk.of_client(upload.client, _write_chunk, upload, part, chunk, offset))
        writing.add_done_callback(count)
        await asyncio.shield(writing)


def spool_key(key: ExchangeKey, client: str) -> SpoolKey:
    """The name of a client's update in the spool."""
    return SpoolKey(key.run_id, key.round, key.exchange, client)


def too_many_kept(config: ServerConfig, limits: TransferLimits, client: str) -> ServerError:
    """The error for a client that has too many unfinished uploads."""
    kept = config.transfers
    most = f"{kept.kept_files} unfinished uploads of {kept.kept_mib} MiB (transfers.kept_files, kept_mib)"
    return limits.exceeded(client, Excess("kept", most, BUSY_WAIT_S))


def _broken(upload: OpenUpload, part: PartFile, why: str) -> UploadBroken:
    """The error for a stream that must start again at the bytes kept."""
    return UploadBroken(upload.header.key, part.kept_bytes, why)


async def _next(stream: ChunkStream, upload: OpenUpload, part: PartFile) -> Request:
    try:
        return await stream.next()
    except TimeoutError:
        raise NotNow(f"{stream.timeout}; what came is kept", BUSY_WAIT_S) from None
    except StopAsyncIteration:
        raise _broken(upload, part, "the stream ended before the trailer") from None


def _write_chunk(upload: OpenUpload, part: PartFile, chunk: ReadChunk, offset: int) -> None:
    """Check a chunk and write it at its place; in a worker thread."""
    try:
        check_chunk(chunk, offset, MAX_CHUNK_BYTES, upload.header.size_bytes)
        part.write(chunk.offset, chunk.data, chunk.crc32c)
    except (ChunkError, ValueError) as error:
        raise _broken(upload, part, str(error)) from error


def _close_unused(opening: asyncio.Future[PartFile]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
