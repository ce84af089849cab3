"""Bundles that came down: fetched once each, from where the last try ended, kept by their digest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from fl_client.errors import BrokenTransfer, WorkFailed
from fl_client.link import Backoff, Link, Session
from protos import codec
from protos.chunks import AnyChunk, ReadChunk
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2
from protos.memory import Recycler

WHOLE_TRIES = 3
"""Times that a bundle is fetched from its start because its digest was wrong although every chunk was right."""


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

    async def get(self, resources: Iterable[tensor_pb2.Resource]) -> dict[tensor_pb2.ResourceKind, Bundle]:
        """The bundles of an assignment by kind; what it does not name is let go first.

        Raises:
            WorkFailed: a resource that this device cannot hold or read.
            ResourceGone: a resource that is no longer sent out.
        """
        async with self._one_at_a_time:
            return await self._get(resources)

    async def _get(self, resources: Iterable[tensor_pb2.Resource]) -> dict[tensor_pb2.ResourceKind, Bundle]:
        wanted = {(resource.kind, self._checked(resource)): resource for resource in resources}
        held = {name: bundle for name, bundle in self._held.items() if name in wanted}
        self._held = held
        for name, resource in wanted.items():
            if name not in held:
                held[name] = await self._fetch(resource, name[1])
        return {kind: held[kind, digest] for kind, digest in wanted}

    def _checked(self, resource: tensor_pb2.Resource) -> bytes:
        """The resource's digest, once it is clear that the bundle can be read and held."""
        if resource.encoding not in (tensor_pb2.ENCODING_UNSPECIFIED, tensor_pb2.ENCODING_PLAIN):
            raise WorkFailed(
                pb.FAILURE_REASON_UNSUPPORTED, f"expected a resource in encoding PLAIN, got number {resource.encoding}"
            )
        if resource.size_bytes > self._max_bytes:
            raise WorkFailed(
                pb.FAILURE_REASON_RESOURCES,
                f"expected a bundle of at most {self._max_bytes} bytes (max_bundle_bytes), got {resource.size_bytes}",
            )
        try:
            return codec.digest_bytes(resource.digest)
        except ValueError as error:
            raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"resource: {error}") from None

    async def _fetch(self, resource: tensor_pb2.Resource, digest: bytes) -> Bundle:
        for _ in range(WHOLE_TRIES):
            data = self._memory.take(resource.size_bytes)
            download = Download(resource, data, Backoff(self._link.waits), self._on_bytes)
            await self._link.patiently(download.go_on, download.backoff)
            layout = download.layout
            if layout is not None and await asyncio.to_thread(layout.digest, data) == digest:
                return Bundle(layout, data)
        raise WorkFailed(
            pb.FAILURE_REASON_RESOURCES,
            f"fetched {codec.digest_text(digest)} {WHOLE_TRIES} times and got bytes of another digest each time",
        )


class Download:
    """One bundle on its way down: a buffer of its final size, and how much of it is here."""

    def __init__(
        self, resource: tensor_pb2.Resource, data: memoryview, backoff: Backoff, on_bytes: Callable[[int], None]
    ) -> None:
        self.backoff = backoff
        self.data = data
        self.layout: codec.Layout | None = None
        self._resource = resource
        self._have = 0
        self._on_bytes = on_bytes

    async def go_on(self, session: Session) -> None:
        """Fetch what is missing. What came before a failure is kept.

        Raises:
            BrokenTransfer: a chunk that is damaged or out of order, or a stream that ended early.
            WorkFailed: a manifest that does not hold together.
        """
        request = pb.FetchModelRequest(session_id=session.id, digest=self._resource.digest, offset=self._have)
        first = True
        async with aclosing(session.connection.fetch(request)) as parts:
            async for part in parts:
                if not isinstance(part, ReadChunk) and part.HasField("header"):
                    self.layout = self._layout_of(part.header.manifest)
                else:
                    self._take(part if isinstance(part, ReadChunk) else part.chunk, session.max_chunk_bytes, first)
                    first = False
        if self.layout is None or self._have < len(self.data):
            raise BrokenTransfer(f"the stream ended at byte {self._have} of {len(self.data)}")

    def _layout_of(self, manifest: tensor_pb2.Manifest) -> codec.Layout:
        try:
            layout = codec.Layout.from_manifest(manifest, len(self.data))
        except codec.LayoutError as error:
            raise WorkFailed(pb.FAILURE_REASON_LAYOUT, f"manifest: {error}") from None
        if layout.size_bytes != len(self.data):
            raise WorkFailed(
                pb.FAILURE_REASON_LAYOUT,
                f"manifest: expected {len(self.data)} bytes as the assignment says, got {layout.size_bytes}",
            )
        return layout

    def _take(self, chunk: AnyChunk, max_chunk_bytes: int, first: bool) -> None:
        if first and chunk.offset <= self._have:
            self._have = chunk.offset  # the coordinator starts at the chunk border below
        try:
            data = codec.check_chunk(chunk, self._have, max_chunk_bytes, len(self.data))
        except codec.ChunkError as error:
            raise BrokenTransfer(str(error)) from None
        self.data[self._have : self._have + len(data)] = data
        self._have += len(data)
        self._on_bytes(len(data))
        self.backoff.reset()
