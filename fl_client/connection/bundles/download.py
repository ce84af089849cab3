"""One transfer of bytes from the coordinator: a chunk at a time, resumed after a cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Protocol

from fl_client.connection.link import Backoff, Session
from fl_client.connection.transport import Fetched
from fl_client.errors import BrokenTransfer, WorkFailed
from protos import codec
from protos.chunks import AnyChunk, ReadChunk
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2
from protos.wire import MAX_CHUNK_BYTES

STALL_S = 300.0
"""Longest wait for one part of a stream: a chunk of 1 MiB at 4 KB/s."""

MAX_STALLS = 3
"""Stalled streams in a row after which a download is given up."""


class Expected(Protocol):
    """The bytes that a download must have."""

    @property
    def digest(self) -> tensor_pb2.Digest:
        """The digest to ask for."""
        ...

    @property
    def run_id(self) -> str:
        """Run of the assignment with the bundle."""
        ...

    @property
    def header_bytes(self) -> int:
        """Largest header that is parsed: a parsed manifest takes many times its size."""
        ...

    def check(self, manifest: tensor_pb2.Manifest) -> None:
        """Raises an error if the manifest is of other bytes."""
        ...


class Download:
    """Bytes in transfer: a buffer of their final size, and how many have been received."""

    def __init__(self, expected: Expected, data: memoryview, backoff: Backoff, on_bytes: Callable[[int], None]) -> None:
        self.backoff = backoff
        self.data = data
        self.described = False
        """Whether a manifest has come. It is the expected one, or the fetch has failed."""
        self._expected = expected
        self._received = self._furthest = 0
        self._stalls = 0
        self._on_bytes = on_bytes

    async def resume(self, session: Session) -> None:
        """Fetch the missing bytes. Bytes received before a failure are kept.

        Raises:
            BrokenTransfer: a chunk that is damaged or out of order, or a stream that ended early or stalled.
            WorkFailed: several streams in a row have stalled.
            Exception: of `Expected.check`, for a manifest of other bytes.
        """
        request = pb.FetchModelRequest(
            session_id=session.id,
            digest=self._expected.digest,
            offset=self._received,
            run_id=self._expected.run_id,
        )
        first, headers = True, 0
        async with aclosing(session.connection.fetch(request, self._expected.header_bytes)) as parts:
            while (part := await self._next(parts)) is not None:
                if not isinstance(part, ReadChunk) and part.HasField("header"):
                    headers += 1
                    if headers > 1:
                        raise BrokenTransfer("expected one header, got another")
                    self._expected.check(part.header.manifest)
                    self.described = True
                else:
                    self._take(part if isinstance(part, ReadChunk) else part.chunk, session.max_chunk_bytes, first)
                    first = False
        if not self.described or self._received < len(self.data):
            raise BrokenTransfer(f"the stream ended at byte {self._received} of {len(self.data)}")

    async def _next(self, parts: AsyncIterator[Fetched]) -> Fetched | None:
        try:
            async with asyncio.timeout(STALL_S):
                return await anext(parts, None)
        except TimeoutError:
            self._stalls += 1
            if self._stalls < MAX_STALLS:
                raise BrokenTransfer(f"the stream stalled for {STALL_S:g} s") from None
            raise WorkFailed(
                pb.FAILURE_REASON_RESOURCES, f"{MAX_STALLS} streams in a row stalled for {STALL_S:g} s"
            ) from None

    def _take(self, chunk: AnyChunk, max_chunk_bytes: int, first: bool) -> None:
        if first and self._received - MAX_CHUNK_BYTES < chunk.offset <= self._received:
            self._received = chunk.offset  # the coordinator starts at the chunk border at or below the offset
        try:
            data = codec.check_chunk(chunk, self._received, max_chunk_bytes, len(self.data))
        except codec.ChunkError as error:
            raise BrokenTransfer(str(error)) from None
        self.data[self._received : self._received + len(data)] = data
        self._received += len(data)
        self._on_bytes(len(data))
        if self._received > self._furthest:  # bytes that were received before are no progress
            self._furthest, self._stalls = self._received, 0
            self.backoff.reset()
