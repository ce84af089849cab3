"""What goes down to clients: bundles that are sent out of the model's own memory, message by message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import algorithms as fl
from fl_server.bundles import packed
from protos.chunks import crc32c
from protos.codec import (
    Buffer,
    Layout,
    chunk_spans,
    digest_message,
    digest_text,
    encode_chunk,
    encode_fetch_header,
)
from protos.fl.v1.tensor_pb2 import ENCODING_PLAIN, Resource, ResourceKind


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Tensors that clients are to have, and what they are."""

    kind: ResourceKind
    tensors: fl.Tensors
    layout: Layout


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One resource as it goes over the wire."""

    resource: Resource
    digest: bytes
    header: bytes
    """The FetchModelResponse before the chunks, encoded."""
    bundle: Buffer
    """Nobody writes into it any more."""
    checksums: tuple[int, ...]
    """CRC-32C of the chunks."""
    chunk_bytes: int

    @property
    def kind(self) -> str:
        """One of "model", "direction" or "frozen"."""
        return ResourceKind.Name(self.resource.kind).removeprefix("RESOURCE_KIND_").lower()

    @property
    def text(self) -> str:
        """The digest as people read it."""
        return digest_text(self.digest)

    def places(self, offset: int) -> Sequence[int]:
        """Where the header and the chunks from the last chunk border at or below `offset` stand among the messages."""
        return (0, *range(1 + offset // self.chunk_bytes, 1 + len(self.checksums)))

    def message(self, place: int) -> tuple[bytes, int]:
        """A FetchModelResponse, encoded, and how many bytes of the tensors are in it: none in the header.

        Encoded when it is sent: kept messages would be the model a second time.
        """
        if not place:
            return self.header, 0
        offset = (place - 1) * self.chunk_bytes
        length = min(self.chunk_bytes, self.resource.size_bytes - offset)
        return encode_chunk(self.bundle, offset, length, self.checksums[place - 1]), length


def make_broadcast(outgoing: Outgoing, chunk_bytes: int) -> Broadcast:
    """Name tensors and make them ready to be sent; those that lie in memory as they are sent are not copied."""
    layout = outgoing.layout
    bundle = packed(outgoing.tensors, layout)
    digest = layout.digest(bundle)
    resource = Resource(
        kind=outgoing.kind, digest=digest_message(digest), size_bytes=layout.size_bytes, encoding=ENCODING_PLAIN
    )
    view = memoryview(bundle)
    spans = chunk_spans(layout.size_bytes, chunk_bytes)
    checksums = tuple(crc32c(view[offset : offset + length]) for offset, length in spans)
    return Broadcast(
        resource, digest, encode_fetch_header(resource, layout.to_manifest()), bundle, checksums, chunk_bytes
    )
