"""Receives the bytes of updates: chunks into a part file, its check as a whole, its final name.

The same code runs in the coordinator and in a worker, which asks the coordinator. What may be received, and what
becomes of it, is decided by the `OpenUpload` that it is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from fl_common.waiting import shielded
from fl_server.admission.norms import UpdateContent
from fl_server.clients.transfer_limits import Excess, TransferLimits
from fl_server.errors import NotNow, ServerError, UploadBroken
from fl_server.metrics import Metrics
from fl_server.settings.config import ServerConfig
from fl_server.store.errors import StoreError
from fl_server.store.spool.part_file import PartBusy, PartFile
from fl_server.store.spool.spool import Spool, SpoolKey, TooManyUnfinished
from fl_server.uploads.stream import ChunkStream, ReadSlots, Request, Requests, trailer_of
from protos.chunks import ChunkError, ReadChunk, check_chunk
from protos.codec import digest_bytes
from protos.fl.v1.training_pb2 import ExchangeKey, Receipt, UpdateHeader, UpdateTrailer
from protos.wire import MAX_CHUNK_BYTES

T = TypeVar("T")


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

    def is_over(self) -> bool:
        """Whether the run has ended, so that nothing of it may be kept; any thread asks."""
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
            self._disk.of_client(client, self._disk.spool.open_part, key, digest, header.size_bytes, upload.is_over)
        )
        try:
            part = await shielded(opening)
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
            await shielded(self._disk.in_io(part.close))

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
        await shielded(writing)


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
