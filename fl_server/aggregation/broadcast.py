"""Bundles for clients, sent from the model's own memory, message by message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

import algorithms as fl
from fl_server.aggregation.bundles import packed
from fl_server.aggregation.encoded.run_encodings import bundle_key, kind_name
from fl_server.aggregation.server_update import Diverged
from fl_server.errors import model_of
from fl_server.run_config import RunConfig
from protos.chunks import crc32c
from protos.codec import (
    Buffer,
    Layout,
    chunk_spans,
    digest_message,
    encode_chunk,
    encode_fetch_header,
)
from protos.encodings import PLAIN, EncodedLayout, EncodingError, EncodingSpec, decode, encode
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_DIRECTION, RESOURCE_KIND_MODEL, Resource, ResourceKind

RECENT = 4
"""Encoded chunks that are kept."""
_HEADROOM, _LARGEST_SQUARED = 128.0, 1e18
"""Every encoding holds values below both: the dtype's maximum divided by the first, and the second, whose square is
finite in float32. EDEN's decoded values are at most 64 times as large as the largest of a block."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Tensors for clients, and their kind."""

    kind: ResourceKind
    tensors: fl.Tensors
    layout: Layout
    name: str = ""
    """Distinguishes tensors of one kind."""
    encoding: EncodingSpec = PLAIN
    key: bytes = b""
    """Of the random numbers of the encoding."""

    @property
    def encoded(self) -> EncodedLayout:
        """The layout on the wire."""
        return EncodedLayout.of(self.layout, self.encoding)

    @property
    def digest(self) -> bytes:
        """The digest of the tensors without an encoding."""
        return self.layout.digest(packed(self.tensors, self.layout))

    def bundle(self) -> Buffer:
        """The bytes on the wire. Tensors in plain layout are not copied if there is no encoding."""
        if self.encoding == PLAIN:
            return packed(self.tensors, self.layout)
        return encode(self.tensors, self.encoded, self.key)

    def received(self, bundle: Buffer) -> fl.Tensors:
        """The values that clients get from the bytes on the wire."""
        return self.tensors if self.encoding == PLAIN else decode(bundle, self.encoded, self.key)


def in_encoding(outgoing: Outgoing, config: RunConfig, round_: int) -> Outgoing:
    """Tensors with the encoding that a run has for their kind. round_: under way."""
    encodings = {RESOURCE_KIND_MODEL: config.encodings.model, RESOURCE_KIND_DIRECTION: config.encodings.direction}
    name = encodings.get(outgoing.kind, PLAIN.name)
    if name == PLAIN.name:
        return outgoing
    return replace(outgoing, encoding=EncodingSpec(name), key=bundle_key(config, outgoing.kind, round_))


def check_encodable(outgoing: Outgoing, after: int) -> None:
    """Raises Diverged if the encoding cannot hold the values. after: the round that computed them."""
    if outgoing.encoding == PLAIN or all(_small(tensor) for tensor in outgoing.tensors.values()):
        return
    try:
        outgoing.bundle()
    except EncodingError as error:
        raise Diverged(
            f"the {kind_name(outgoing.kind)} after round {after} cannot be sent as {outgoing.encoding.name}: {error}; "
            f"{model_of(after - 1)} stays. Lower the learning rate"
        ) from error


def _small(tensor: torch.Tensor) -> bool:
    """Whether every encoding holds the tensor's values, which is cheap to find out."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    least, greatest = torch.aminmax(tensor)
    return max(-float(least), float(greatest)) < min(torch.finfo(tensor.dtype).max / _HEADROOM, _LARGEST_SQUARED)


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
    _recent: dict[int, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The latest encoded chunks by place: clients that fetch at the same time share them."""

    @property
    def kind(self) -> str:
        """One of "model", "direction", "frozen" or "optimizer"."""
        return kind_name(self.resource.kind)

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


def make_broadcast(outgoing: Outgoing, chunk_bytes: int) -> Broadcast:
    """Encode tensors for sending, and compute digest and checksums. Plain tensors in wire layout are not copied."""
    encoded, bundle = outgoing.encoded, outgoing.bundle()
    digest = encoded.digest(bundle)
    resource = Resource(
        kind=outgoing.kind,
        digest=digest_message(digest),
        size_bytes=encoded.size_bytes,
        encoding=outgoing.encoding.wire,
        name=outgoing.name,
        encoding_key=outgoing.key,
    )
    view = memoryview(bundle)
    spans = chunk_spans(encoded.size_bytes, chunk_bytes)
    checksums = tuple(crc32c(view[offset : offset + length]) for offset, length in spans)
    values_digest = digest if outgoing.encoding == PLAIN else outgoing.digest
    header = encode_fetch_header(resource, encoded.to_manifest())
    return Broadcast(resource, digest, values_digest, header, bundle, checksums, chunk_bytes)
