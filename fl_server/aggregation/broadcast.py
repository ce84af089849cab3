"""Bundles for clients, sent from the model's own memory, and files of releases, message by message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fl_server.aggregation.outgoing import Outgoing, kind_name
from protos.chunks import crc32c
from protos.codec import Buffer, chunk_spans, digest_message, digest_of, encode_chunk, encode_fetch_header
from protos.differences import make_difference
from protos.encodings import PLAIN
from protos.fl.v1.tensor_pb2 import ENCODING_PLAIN, Difference, Manifest, Resource, ResourceKind

RECENT = 4
"""Encoded chunks that are kept."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Broadcast:
    """One resource as it goes over the wire."""

    resource: Resource
    digest: bytes
    values_digest: bytes
    """Digest of the tensors before they were encoded; without an encoding the same as `digest`."""
    header: bytes
    """The FetchModelResponse before the chunks, encoded."""
    bundle: Buffer
    """It does not change any more."""
    checksums: tuple[int, ...]
    """CRC-32C of the chunks."""
    chunk_bytes: int
    difference: Broadcast | None = None
    """A difference to the bundle that was sent before, for clients that still have that one."""
    _recent: dict[int, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The latest encoded chunks by place: clients that fetch at the same time share them."""

    @property
    def kind(self) -> str:
        """One of "model", "direction", "frozen", "optimizer", "averaged", "release" or "package"."""
        return kind_name(self.resource.kind)

    def named(self, digest: bytes) -> Broadcast | None:
        """This broadcast or its difference, if it has that digest."""
        if self.digest == digest:
            return self
        return self.difference.named(digest) if self.difference else None

    def places(self, offset: int) -> Sequence[int]:
        """Positions of the messages to send: the header, and the chunks from the last chunk border up to `offset`."""
        return (0, *range(1 + offset // self.chunk_bytes, 1 + len(self.checksums)))

    def message(self, place: int) -> tuple[bytes, int]:
        """An encoded FetchModelResponse, and its number of tensor bytes (0 for the header).

        Chunks are encoded when they are sent, and only the latest are kept: all of them would take the memory of a
        second model.
        """
        if not place:
            return self.header, 0
        offset = (place - 1) * self.chunk_bytes
        length = min(self.chunk_bytes, self.resource.size_bytes - offset)
        message = self._recent.get(place)
        if message is None:
            message = self._recent[place] = encode_chunk(self.bundle, offset, length, self.checksums[place - 1])
            if len(self._recent) > RECENT:
                del self._recent[next(iter(self._recent))]
        return message, length


def make_broadcast(outgoing: Outgoing, chunk_bytes: int, previous: Broadcast | None = None) -> Broadcast:
    """Encode tensors for sending, and compute digest and checksums. Plain tensors in wire layout are not copied.

    previous: the bundle of the same kind and name that was sent before. If the run makes differences, a smaller one to
    it is sent too, and equal bytes are the previous broadcast itself.
    """
    encoded, bundle = outgoing.encoded, outgoing.bundle()
    digest = encoded.digest(bundle)
    resource = Resource(
        kind=outgoing.kind,
        digest=digest_message(digest),
        size_bytes=encoded.size_bytes,
        encoding=outgoing.encoding.wire,
        name=outgoing.name,
        encoding_key=outgoing.key,
        is_base=bool(outgoing.word),
    )
    difference = None
    if outgoing.word and previous is not None:
        if previous.digest == digest and previous.resource.encoding_key == outgoing.key:
            return previous
        if len(previous.bundle) == len(bundle) and (data := make_difference(previous.bundle, bundle, outgoing.word)):
            difference = plain_broadcast(resource.kind, data, chunk_bytes, resource.name)
            resource.difference.CopyFrom(_described(difference, previous, outgoing.word))
    values_digest = digest if outgoing.encoding == PLAIN else outgoing.digest
    header = encode_fetch_header(resource, encoded.to_manifest())
    checksums = _checksums(bundle, chunk_bytes)
    return Broadcast(resource, digest, values_digest, header, bundle, checksums, chunk_bytes, difference)


def plain_broadcast(kind: ResourceKind, data: Buffer, chunk_bytes: int, name: str = "") -> Broadcast:
    """The broadcast of bytes that are no tensors: of a difference that makes a resource, or the files of a release."""
    digest = digest_of(data)
    own = Resource(
        kind=kind,
        digest=digest_message(digest),
        size_bytes=len(data),
        encoding=ENCODING_PLAIN,
        name=name,
    )
    header = encode_fetch_header(own, Manifest(size_bytes=len(data), encoding=ENCODING_PLAIN))
    return Broadcast(own, digest, digest, header, data, _checksums(data, chunk_bytes), chunk_bytes)


def _described(difference: Broadcast, base: Broadcast, word: int) -> Difference:
    """A difference as the resource that it makes names it."""
    own = difference.resource
    return Difference(base=base.resource.digest, digest=own.digest, size_bytes=own.size_bytes, word_bytes=word)


def _checksums(data: Buffer, chunk_bytes: int) -> tuple[int, ...]:
    """CRC-32C of the chunks of some bytes."""
    view = memoryview(data)
    spans = chunk_spans(len(view), chunk_bytes)
    return tuple(crc32c(view[offset : offset + length]) for offset, length in spans)
