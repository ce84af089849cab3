"""Downloaded bundles: each is fetched once, resumed after a cut, and held under its digest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from fl_client.connection.link import Backoff, Link, Session
from fl_client.connection.transport import Fetched
from fl_client.errors import BrokenTransfer, WorkFailed
from fl_client.storage.pending_updates import name_of
from protos import codec
from protos.buffers import BufferPool
from protos.chunks import AnyChunk, ReadChunk
from protos.encodings import PLAIN, EncodedLayout, EncodingError, EncodingSpec, decode
from protos.encodings.random_words import KEY_BYTES
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2
from protos.wire import MAX_CHUNK_BYTES

FULL_TRIES = 3
"""Times that a bundle is fetched from its start because its digest was wrong although every chunk was right."""


STALL_S = 300.0
"""Longest wait for one part of a stream: a chunk of 1 MiB at 4 KB/s."""

MAX_STALLS = 3
"""Stalled streams in a row after which a bundle is given up."""

COMPARED_BYTES = 64 << 10
"""A bundle of the wrong size is fetched, to name the difference in its manifest, up to twice the right size plus this.
A larger one is refused at once."""

HEADER_BYTES = 64 << 10
"""Size of a header, in addition to twice the expected manifest."""

ResourceKey = tensor_pb2.ResourceKind | tuple[tensor_pb2.ResourceKind, str]
"""The kind of a resource, and its name if it has one."""

Layouts = Mapping[tensor_pb2.ResourceKind, codec.Layout]
"""Layouts of the bundles of this device's own model, by kind."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Named tensors as bytes."""

    layout: codec.Layout
    data: memoryview


def key_of_resource(resource: tensor_pb2.Resource) -> ResourceKey:
    """The key of a resource among those of an assignment."""
    return (resource.kind, resource.name) if resource.name else resource.kind


_Name = tuple[ResourceKey, bytes, bytes]
"""Key of a resource, its digest, and the key of its encoding's random numbers."""


class BundleCache:
    """Holds the bundles of the current assignment by digest, so that a held bundle is never fetched again."""

    def __init__(self, link: Link, max_bytes: int, on_bytes: Callable[[int], None]) -> None:
        self._link = link
        self._max_bytes = max_bytes
        self._on_bytes = on_bytes
        self._memory = BufferPool()
        # Training and evaluation may need the same model at the same time: only one of them fetches it.
        self._lock = asyncio.Lock()
        # By kind too: a model and a direction of zeros have the same bytes and different manifests.
        self._held: dict[_Name, Bundle] = {}
        self._encoded: dict[tensor_pb2.ResourceKind, EncodedLayout] = {}
        """The latest layouts: those of the rounds of a run are equal, and are computed once."""

    async def get(self, resources: Iterable[tensor_pb2.Resource], expected: Layouts) -> dict[ResourceKey, Bundle]:
        """The bundles of an assignment by kind, and by name if they have one. All others are released first.

        expected: the layouts of this device's model. Nothing else is fetched.

        Raises:
            WorkFailed: a resource that this device cannot hold or read.
            ResourceGone: the coordinator no longer sends a resource.
        """
        async with self._lock:
            return await self._get(resources, expected)

    async def _get(self, resources: Iterable[tensor_pb2.Resource], expected: Layouts) -> dict[ResourceKey, Bundle]:
        wanted = {
            (key_of_resource(resource), self._checked(resource, expected), resource.encoding_key): resource
            for resource in resources
        }
        held = {name: bundle for name, bundle in self._held.items() if name in wanted}
        self._held = held
        for name, resource in wanted.items():
            if name not in held:
                held[name] = await self._fetch(ExpectedBundle(resource, self._encoding(resource, expected)), name[1])
        return {name[0]: held[name] for name in wanted}

    def _checked(self, resource: tensor_pb2.Resource, expected: Layouts) -> bytes:
        """The resource's digest. Raises WorkFailed unless encoding, size and kind fit this device and its model."""
        _encoding_of(resource)  # its error comes first
        if resource.size_bytes > self._max_bytes:
            raise WorkFailed(
                pb.FAILURE_REASON_RESOURCES,
                f"expected a bundle of at most {self._max_bytes} bytes (max_bundle_bytes), got {resource.size_bytes}",
            )
        if resource.kind not in expected:
            raise WorkFailed(
                pb.FAILURE_REASON_LAYOUT, f"expected no resource of kind number {resource.kind}: this model has none"
            )
        size = self._encoding(resource, expected).size_bytes
        if resource.size_bytes > _comparable(size):
            raise WorkFailed(
                pb.FAILURE_REASON_LAYOUT,
                f"{_name(resource)}: expected {size} bytes for the model here, got {resource.size_bytes}",
            )
        try:
            return codec.digest_bytes(resource.digest)
        except ValueError as error:
            raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"resource: {error}") from None

    def _encoding(self, resource: tensor_pb2.Resource, expected: Layouts) -> EncodedLayout:
        """The layout of a resource on the wire. Raises WorkFailed for an encoding that is not known here."""
        layout, spec = expected[resource.kind], _encoding_of(resource)
        known = self._encoded.get(resource.kind)
        if known is None or known.layout is not layout or known.spec != spec:
            known = self._encoded[resource.kind] = EncodedLayout.of(layout, spec)
        return known

    async def _fetch(self, expected: ExpectedBundle, digest: bytes) -> Bundle:
        for _ in range(FULL_TRIES):
            data = self._memory.take(expected.encoded.size_bytes)
            download = Download(expected, data, Backoff(self._link.delays), self._on_bytes)
            await self._link.call_with_retry(download.resume, download.backoff)
            if download.described and await asyncio.to_thread(expected.encoded.digest, data) == digest:
                return await asyncio.to_thread(self._decoded, expected, data)
        raise WorkFailed(
            pb.FAILURE_REASON_RESOURCES,
            f"fetched {codec.digest_text(digest)} {FULL_TRIES} times and got bytes of another digest each time",
        )

    @staticmethod
    def _decoded(expected: ExpectedBundle, data: memoryview) -> Bundle:
        """The bundle of a resource's bytes. Raises WorkFailed if the encoding does not have such bytes."""
        layout, resource = expected.encoded.layout, expected.resource
        if expected.encoded.spec == PLAIN:
            return Bundle(layout, data)
        try:
            tensors = decode(data, expected.encoded, resource.encoding_key)
        except (EncodingError, codec.LayoutError) as error:
            raise WorkFailed(pb.FAILURE_REASON_LAYOUT, f"{_name(resource)}: {error}") from error
        return Bundle(layout, codec.pack(tensors, layout))


@dataclass(frozen=True, slots=True)
class ExpectedBundle:
    """A resource, and its layout by this device's model."""

    resource: tensor_pb2.Resource
    encoded: EncodedLayout

    @property
    def header_bytes(self) -> int:
        """Largest header that is parsed: a parsed manifest takes many times its size."""
        return HEADER_BYTES + 2 * self.encoded.manifest.ByteSize()


class Download:
    """One bundle in transfer: a buffer of its final size, and the bytes received so far."""

    def __init__(
        self, expected: ExpectedBundle, data: memoryview, backoff: Backoff, on_bytes: Callable[[int], None]
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
            WorkFailed: a manifest that does not fit the model.
        """
        digest = self._expected.resource.digest
        request = pb.FetchModelRequest(session_id=session.id, digest=digest, offset=self._received)
        first, headers = True, 0
        async with aclosing(session.connection.fetch(request, self._expected.header_bytes)) as parts:
            while (part := await self._next(parts)) is not None:
                if not isinstance(part, ReadChunk) and part.HasField("header"):
                    headers += 1
                    if headers > 1:
                        raise BrokenTransfer("expected one header, got another")
                    self._check_manifest(part.header.manifest)
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

    def _check_manifest(self, manifest: tensor_pb2.Manifest) -> None:
        """Raises WorkFailed if it is not the expected one."""
        encoded, limit = self._expected.encoded, _comparable(len(self.data))
        if manifest == encoded.manifest:
            return  # exactly as expected; the code below finds the difference otherwise
        if encoded.spec == PLAIN:
            try:
                difference = encoded.layout.difference(codec.Layout.from_manifest(manifest, limit))
            except codec.LayoutError as error:
                raise WorkFailed(pb.FAILURE_REASON_LAYOUT, f"manifest: {error}") from None
        else:
            difference = encoded.difference_from(manifest, limit)
        if difference:
            name = _name(self._expected.resource)
            raise WorkFailed(
                pb.FAILURE_REASON_LAYOUT, f"{name}, the model here against the coordinator's: {difference}"
            )

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


def _encoding_of(resource: tensor_pb2.Resource) -> EncodingSpec:
    """Raises WorkFailed for an encoding that this device cannot read, or a wrong key."""
    try:
        encoding = EncodingSpec.from_wire(resource.encoding or tensor_pb2.ENCODING_PLAIN)
    except ValueError as error:
        raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"{_name(resource)}: {error}") from None
    if len(resource.encoding_key) != (0 if encoding == PLAIN else KEY_BYTES):
        raise WorkFailed(
            pb.FAILURE_REASON_UNSUPPORTED,
            f"{_name(resource)}: expected an encoding_key of {KEY_BYTES} bytes, or none with PLAIN, got "
            f"{len(resource.encoding_key)}",
        )
    return encoding


def _comparable(size_bytes: int) -> int:
    """Largest bundle whose manifest is read, to name how it differs from the expected one of `size_bytes`."""
    return 2 * size_bytes + COMPARED_BYTES


def _name(resource: tensor_pb2.Resource) -> str:
    return name_of(tensor_pb2.ResourceKind, resource.kind)
