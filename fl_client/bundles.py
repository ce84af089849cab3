"""Bundles that came down: fetched once each, from where the last try ended, kept by their digest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from fl_client.errors import BrokenTransfer, WorkFailed
from fl_client.link import Backoff, Link, Session
from fl_client.transport import Fetched
from protos import codec
from protos.chunks import AnyChunk, ReadChunk
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2
from protos.memory import Recycler
from protos.wire import MAX_CHUNK_BYTES

WHOLE_TRIES = 3
"""Times that a bundle is fetched from its start because its digest was wrong although every chunk was right."""


STALL_S = 300.0
"""Patience with a stream that brings nothing: a chunk of 1 MiB at 4 KB/s."""

STALLS = 3
"""Streams in a row that brought nothing until then, after which a bundle is given up."""

COMPARED_BYTES = 64 << 10
"""A bundle of the wrong size is refused by what its header lists, if it is not over twice the right size and this. A
larger one is refused without a question."""

HEADER_BYTES = 64 << 10
"""Of a header, beside twice the table of contents that is expected."""

Layouts = Mapping[tensor_pb2.ResourceKind, codec.Layout]
"""How the bundles of this device's own model lie, by kind."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Named tensors as they lie in bytes."""

    layout: codec.Layout
    data: memoryview


class BundleCache:
    """Holds what the assignment of the moment needs, by digest, so that a held bundle is never fetched again."""

    def __init__(self, link: Link, max_bytes: int, on_bytes: Callable[[int], None]) -> None:
        self._link = link
        self._max_bytes = max_bytes
        self._on_bytes = on_bytes
        self._memory = Recycler()
        # Training and evaluating want the same model at the same time: one of them fetches it.
        self._one_at_a_time = asyncio.Lock()
        # By kind too: a model and a direction of zeros have the same bytes, and other manifests.
        self._held: dict[tuple[tensor_pb2.ResourceKind, bytes], Bundle] = {}

    async def get(
        self, resources: Iterable[tensor_pb2.Resource], expected: Layouts
    ) -> dict[tensor_pb2.ResourceKind, Bundle]:
        """The bundles of an assignment by kind; what it does not name is let go first.

        expected: those that are this device's model's. Nothing else is fetched.

        Raises:
            WorkFailed: a resource that this device cannot hold or read.
            ResourceGone: a resource that is no longer sent out.
        """
        async with self._one_at_a_time:
            return await self._get(resources, expected)

    async def _get(
        self, resources: Iterable[tensor_pb2.Resource], expected: Layouts
    ) -> dict[tensor_pb2.ResourceKind, Bundle]:
        wanted = {(resource.kind, self._checked(resource, expected)): resource for resource in resources}
        held = {name: bundle for name, bundle in self._held.items() if name in wanted}
        self._held = held
        for name, resource in wanted.items():
            if name not in held:
                held[name] = await self._fetch(Wanted(resource, expected[resource.kind]), name[1])
        return {kind: held[kind, digest] for kind, digest in wanted}

    def _checked(self, resource: tensor_pb2.Resource, expected: Layouts) -> bytes:
        """The resource's digest, once it is clear that the bundle can be read and held, and is one of the model's."""
        if resource.encoding not in (tensor_pb2.ENCODING_UNSPECIFIED, tensor_pb2.ENCODING_PLAIN):
            raise WorkFailed(
                pb.FAILURE_REASON_UNSUPPORTED, f"expected a resource in encoding PLAIN, got number {resource.encoding}"
            )
        if resource.size_bytes > self._max_bytes:
            raise WorkFailed(
                pb.FAILURE_REASON_RESOURCES,
                f"expected a bundle of at most {self._max_bytes} bytes (max_bundle_bytes), got {resource.size_bytes}",
            )
        if resource.kind not in expected:
            raise WorkFailed(
                pb.FAILURE_REASON_LAYOUT, f"expected no resource of kind number {resource.kind}: this model has none"
            )
        if resource.size_bytes > _comparable(size := expected[resource.kind].size_bytes):
            raise WorkFailed(
                pb.FAILURE_REASON_LAYOUT,
                f"{_name(resource)}: expected {size} bytes for the model here, got {resource.size_bytes}",
            )
        try:
            return codec.digest_bytes(resource.digest)
        except ValueError as error:
            raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"resource: {error}") from None

    async def _fetch(self, wanted: Wanted, digest: bytes) -> Bundle:
        for _ in range(WHOLE_TRIES):
            data = self._memory.take(wanted.layout.size_bytes)
            download = Download(wanted, data, Backoff(self._link.waits), self._on_bytes)
            await self._link.patiently(download.go_on, download.backoff)
            layout = download.layout
            if layout is not None and await asyncio.to_thread(layout.digest, data) == digest:
                return Bundle(layout, data)
        raise WorkFailed(
            pb.FAILURE_REASON_RESOURCES,
            f"fetched {codec.digest_text(digest)} {WHOLE_TRIES} times and got bytes of another digest each time",
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A resource, and how the tensors of this device's model lie in it."""

    resource: tensor_pb2.Resource
    layout: codec.Layout

    @property
    def header_bytes(self) -> int:
        """Largest header that is read: parsed, a table of contents takes many times its size."""
        return HEADER_BYTES + 2 * self.layout.to_manifest().ByteSize()


class Download:
    """One bundle on its way down: a buffer of its final size, and how much of it is here."""

    def __init__(self, wanted: Wanted, data: memoryview, backoff: Backoff, on_bytes: Callable[[int], None]) -> None:
        self.backoff = backoff
        self.data = data
        self.layout: codec.Layout | None = None
        self._wanted = wanted
        self._have = self._furthest = 0
        self._stalls = 0
        self._on_bytes = on_bytes

    async def go_on(self, session: Session) -> None:
        """Fetch what is missing. What came before a failure is kept.

        Raises:
            BrokenTransfer: a chunk that is damaged or out of order, or a stream that ended early or brings nothing.
            WorkFailed: a table of contents that is not the model's.
        """
        digest = self._wanted.resource.digest
        request = pb.FetchModelRequest(session_id=session.id, digest=digest, offset=self._have)
        first, headers = True, 0
        async with aclosing(session.connection.fetch(request, self._wanted.header_bytes)) as parts:
            while (part := await self._next(parts)) is not None:
                if not isinstance(part, ReadChunk) and part.HasField("header"):
                    headers += 1
                    if headers > 1:
                        raise BrokenTransfer("expected one header, got another")
                    self.layout = self._layout_of(part.header.manifest)
                else:
                    self._take(part if isinstance(part, ReadChunk) else part.chunk, session.max_chunk_bytes, first)
                    first = False
        if self.layout is None or self._have < len(self.data):
            raise BrokenTransfer(f"the stream ended at byte {self._have} of {len(self.data)}")

    async def _next(self, parts: AsyncIterator[Fetched]) -> Fetched | None:
        try:
            async with asyncio.timeout(STALL_S):
                return await anext(parts, None)
        except TimeoutError:
            self._stalls += 1
            if self._stalls < STALLS:
                raise BrokenTransfer(f"the stream brought nothing for {STALL_S:g} s") from None
            raise WorkFailed(
                pb.FAILURE_REASON_RESOURCES, f"{STALLS} streams in a row brought nothing for {STALL_S:g} s"
            ) from None

    def _layout_of(self, manifest: tensor_pb2.Manifest) -> codec.Layout:
        try:
            layout = codec.Layout.from_manifest(manifest, _comparable(len(self.data)))
        except codec.LayoutError as error:
            raise WorkFailed(pb.FAILURE_REASON_LAYOUT, f"manifest: {error}") from None
        if difference := self._wanted.layout.difference(layout):
            name = _name(self._wanted.resource)
            raise WorkFailed(
                pb.FAILURE_REASON_LAYOUT, f"{name}, the model here against the coordinator's: {difference}"
            )
        return layout

    def _take(self, chunk: AnyChunk, max_chunk_bytes: int, first: bool) -> None:
        if first and self._have - MAX_CHUNK_BYTES < chunk.offset <= self._have:
            self._have = chunk.offset  # the coordinator starts at the chunk border below
        try:
            data = codec.check_chunk(chunk, self._have, max_chunk_bytes, len(self.data))
        except codec.ChunkError as error:
            raise BrokenTransfer(str(error)) from None
        self.data[self._have : self._have + len(data)] = data
        self._have += len(data)
        self._on_bytes(len(data))
        if self._have > self._furthest:  # the same bytes again and again are no progress
            self._furthest, self._stalls = self._have, 0
            self.backoff.reset()


def _comparable(size_bytes: int) -> int:
    """Largest bundle whose table of contents is read to tell how it differs from the one of so many bytes here."""
    return 2 * size_bytes + COMPARED_BYTES


def _name(resource: tensor_pb2.Resource) -> str:
    return tensor_pb2.ResourceKind.Name(resource.kind)
