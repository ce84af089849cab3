"""Transfers from the coordinator, resumed after a cut: of a bundle, or of a difference to a held one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from fl_client.connection.bundles.expected import HEADER_BYTES, ExpectedBundle, ResourceKey, key_of_resource, kind_text
from fl_client.connection.link import Backoff, Link, Session
from fl_client.connection.messages import log_text
from fl_client.connection.transport import Fetched
from fl_client.errors import BrokenTransfer, GivenUp, ResourceGone, WorkFailed, beyond_limits
from fl_common.units import counted
from protos.buffers import BufferPool, zeros
from protos.chunks import AnyChunk, ChunkError, ReadChunk, check_chunk
from protos.codec import digest_bytes, digest_of
from protos.differences import WORD_BYTES, DifferenceError, apply_difference
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2
from protos.wire import MAX_CHUNK_BYTES

STALL_S = 300.0
"""Longest wait for one part of a stream: a chunk of 1 MiB at 4 KB/s."""

MAX_STALLS = 3
"""Stalled streams in a row after which a download is given up."""


class Download:
    """Bytes in transfer: a buffer of their final size, and how many have been received."""

    def __init__(
        self,
        expected: ExpectedBundle | ExpectedBytes,
        data: memoryview,
        backoff: Backoff,
        on_bytes: Callable[[int], None],
    ) -> None:
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
            WorkFailed, DifferenceError: by the `check` of what is expected, for a manifest of other bytes.
        """
        request = pb.FetchModelRequest(
            session_id=session.id, digest=self._expected.digest, offset=self._received, run_id=self._expected.run_id
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
            raise beyond_limits(f"{MAX_STALLS} streams in a row stalled for {STALL_S:g} s") from None

    def _take(self, chunk: AnyChunk, max_chunk_bytes: int, first: bool) -> None:
        if first and self._received - MAX_CHUNK_BYTES < chunk.offset <= self._received:
            self._received = chunk.offset  # the coordinator starts at the chunk border at or below the offset
        try:
            data = check_chunk(chunk, self._received, max_chunk_bytes, len(self.data))
        except ChunkError as error:
            raise BrokenTransfer(str(error)) from None
        self.data[self._received : self._received + len(data)] = data
        self._received += len(data)
        self._on_bytes(len(data))
        if self._received > self._furthest:  # bytes that were received before are no progress
            self._furthest, self._stalls = self._received, 0
            self.backoff.reset()


log = structlog.get_logger()

MAX_BROKEN = 5
"""Transfers of a difference with damaged bytes after which the bundle is fetched."""

_Name = tuple[ResourceKey, bytes]
"""Key of a resource, and its digest."""


class Differences:
    """Keeps the bytes that a later bundle may be a difference to, and fetches differences to them.

    Only bytes of resources that a run names as bases are kept, besides the bundles that are made of them.
    """

    def __init__(self, link: Link, memory: BufferPool, on_bytes: Callable[[int], None]) -> None:
        self._link = link
        self._memory = memory
        self._on_bytes = on_bytes
        self._bases: dict[_Name, memoryview] = {}
        """Encoded bytes. By kind too: a model and a direction of the same bytes are released at other times."""

    def keep(self, resource: tensor_pb2.Resource, data: memoryview) -> None:
        """Keep the bytes of a fetched resource, if a later one may be a difference to it. They must not change."""
        self._bases.pop(_name(resource, resource.difference.base), None)
        if resource.is_base:
            self._bases[_name(resource, resource.digest)] = data

    def release_others(self, resources: Iterable[tensor_pb2.Resource]) -> None:
        """Release what is neither one of an assignment's resources nor the base of one."""
        used = {
            _name(resource, digest) for resource in resources for digest in (resource.digest, resource.difference.base)
        }
        self._bases = {name: data for name, data in self._bases.items() if name in used}

    async def bundle(self, expected: ExpectedBundle) -> memoryview | None:
        """The bytes of a resource, made of a kept base and a fetched difference. None: the resource must be fetched."""
        difference = expected.resource.difference
        base = self._bases.get(_name(expected.resource, difference.base))
        if base is None:
            return None
        try:
            _check(difference, expected, base)
            return await self._made(base, difference, expected)
        except (DifferenceError, WorkFailed, ResourceGone, GivenUp) as error:
            reason = log_text(str(error))
            log.warning("difference_not_used", resource=kind_text(expected.resource), reason=reason)
            return None

    async def _made(self, base: memoryview, difference: tensor_pb2.Difference, expected: ExpectedBundle) -> memoryview:
        came = await self._fetch(ExpectedBytes(difference.digest, difference.size_bytes, expected.run_id))
        data = self._memory.take(expected.size_bytes)
        await asyncio.to_thread(apply_difference, base, came, difference.word_bytes, data)
        if not await asyncio.to_thread(expected.has_digest, data):
            raise DifferenceError("expected the difference to make the bundle, got bytes of another digest")
        return data

    async def _fetch(self, expected: ExpectedBytes) -> memoryview:
        data = zeros(expected.size_bytes)
        download = Download(expected, data, Backoff(self._link.delays), self._on_bytes)
        broken = 0

        async def resume(session: Session) -> None:
            nonlocal broken
            try:
                await download.resume(session)
            except BrokenTransfer as error:
                broken += 1
                if broken == MAX_BROKEN:
                    raise DifferenceError(f"broken {counted(broken, 'time')}: {error}") from error
                raise

        await self._link.call_with_retry(resume, download.backoff)
        if await asyncio.to_thread(digest_of, data) != digest_bytes(expected.digest):
            raise DifferenceError("expected the bytes of the difference, got bytes of another digest")
        return data


@dataclass(frozen=True, slots=True)
class ExpectedBytes:
    """Bytes that are no tensors: of a difference, or the files of a release."""

    digest: tensor_pb2.Digest
    """The digest to ask for."""
    size_bytes: int
    run_id: str = ""
    """Run of the assignment."""

    @property
    def header_bytes(self) -> int:
        """Largest header that is parsed: a manifest without tensors."""
        return HEADER_BYTES

    def check(self, manifest: tensor_pb2.Manifest) -> None:
        """Raises DifferenceError for a manifest of anything but these bytes."""
        expected = tensor_pb2.Manifest(size_bytes=self.size_bytes, encoding=tensor_pb2.ENCODING_PLAIN)
        if manifest != expected:
            raise DifferenceError(
                f"expected a manifest of {expected.size_bytes} bytes without tensors, got {manifest.size_bytes} bytes, "
                f"{counted(len(manifest.tensors), 'tensor')} and encoding number {manifest.encoding}"
            )


def _name(resource: tensor_pb2.Resource, digest: tensor_pb2.Digest) -> _Name:
    return key_of_resource(resource), digest.value


def _check(difference: tensor_pb2.Difference, expected: ExpectedBundle, base: memoryview) -> None:
    """Raises DifferenceError unless a described difference can make the bundle from a base of so many bytes."""
    if difference.word_bytes not in WORD_BYTES:
        raise DifferenceError(f"expected words of 1, 2, 4 or 8 bytes, got {difference.word_bytes}")
    if not expected.resource.size_bytes == expected.size_bytes == len(base):
        raise DifferenceError(
            f"expected a bundle and a base of {expected.size_bytes} bytes, got {expected.resource.size_bytes} and "
            f"{len(base)}"
        )
    if not 0 < difference.size_bytes < expected.size_bytes:
        raise DifferenceError(
            f"expected a difference of 1 to {expected.size_bytes - 1} bytes, got {difference.size_bytes}"
        )
    try:
        digest_bytes(difference.digest)
    except ValueError as error:
        raise DifferenceError(f"difference: {error}") from None
