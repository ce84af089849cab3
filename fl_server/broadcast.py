"""What goes down to clients: each bundle encoded once, into immutable messages that every stream shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import algorithms as fl
from protos.codec import Layout, digest_message, digest_text, encode_fetch_stream, pack
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
    messages: tuple[bytes, ...]
    """Encoded FetchModelResponse messages: the header, then chunks of `chunk_bytes`."""
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
        return (0, *range(1 + offset // self.chunk_bytes, len(self.messages)))

    def message(self, place: int) -> tuple[bytes, int]:
        """A message, and how many bytes of the tensors are in it: none in the header."""
        rest = self.resource.size_bytes - (place - 1) * self.chunk_bytes
        return self.messages[place], min(self.chunk_bytes, rest) if place else 0


def make_broadcast(outgoing: Outgoing, chunk_bytes: int) -> Broadcast:
    """Pack, name and encode tensors. One copy of them stays: the messages."""
    layout = outgoing.layout
    buffer = pack(outgoing.tensors, layout)
    digest = layout.digest(buffer)
    resource = Resource(
        kind=outgoing.kind, digest=digest_message(digest), size_bytes=layout.size_bytes, encoding=ENCODING_PLAIN
    )
    messages = encode_fetch_stream(resource, layout.to_manifest(), buffer, chunk_bytes)
    return Broadcast(resource, digest, messages, chunk_bytes)
