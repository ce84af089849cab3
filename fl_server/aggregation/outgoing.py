"""The bundles that a run sends for an exchange, each in its encoding, and the checks that it can hold them.

They are sent from the model's own memory, message by message; files of releases go the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

import algorithms as fl
from algorithms import tree
from algorithms.compose import SENT
from algorithms.optimizers.federated import averaged_state
from algorithms.optimizers.spec import PREFIX
from fl_server.aggregation.server_update import Diverged, check_finite
from fl_server.aggregation.snapshot import Snapshot
from fl_server.aggregation.task_model import CPU, master_layout, packed
from fl_server.errors import model_of
from fl_server.run_settings.config import RunConfig
from protos.chunks import Buffer, chunk_spans, crc32c, encode_chunk, encode_fetch_header
from protos.codec import Layout, digest_message, digest_of
from protos.differences import make_difference
from protos.encoding_spec import EDEN
from protos.encodings import PLAIN, EncodedLayout, EncodingError, EncodingSpec, decode, encode, encoding_key
from protos.fl.v1 import tensor_pb2 as pb

_HEADROOM, _LARGEST_SQUARED = 128.0, 1e18
"""Every encoding holds values below both: the dtype's maximum divided by the first, and the second, whose square is
finite in float32. EDEN's decoded values are at most 64 times as large as the largest of a block."""

_WORDS: Mapping[str, int] = MappingProxyType({"bf16": 2, "int8": 1, "int4": 1, "int2": 1})
"""Bytes of a word of differences, by encoding. In a plain bundle it is the size of most elements."""


RECENT = 4
"""Encoded chunks that are kept."""


def kind_name(kind: pb.ResourceKind) -> str:
    """One of "model", "direction", "frozen", "optimizer", "averaged", "release" or "package"."""
    return pb.ResourceKind.Name(kind).removeprefix("RESOURCE_KIND_").lower()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Tensors for clients, and their kind."""

    kind: pb.ResourceKind
    tensors: fl.Tensors
    layout: Layout
    name: str = ""
    """Distinguishes tensors of one kind."""
    encoding: EncodingSpec = PLAIN
    key: bytes = b""
    """The key of the encoding's random numbers."""
    word: int = 0
    """Bytes of a word of the differences between two such bundles; 0: none are made."""

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
        return encode(tree.to(self.tensors, CPU), self.encoded, self.key)

    def received(self, bundle: Buffer) -> fl.Tensors:
        """The values that clients get from the bytes on the wire."""
        return self.tensors if self.encoding == PLAIN else decode(bundle, self.encoded, self.key)


def in_encoding(outgoing: Outgoing, config: RunConfig, round_: int) -> Outgoing:
    """Tensors with the encoding and the differences that a run has for their kind. round_: under way."""
    encodings = {
        pb.RESOURCE_KIND_MODEL: config.encodings.model,
        pb.RESOURCE_KIND_AVERAGED: config.encodings.model,
        pb.RESOURCE_KIND_DIRECTION: config.encodings.direction,
    }
    if outgoing.kind not in encodings:
        return outgoing
    name = encodings[outgoing.kind]
    # EDEN rotates with other signs in each round, so two of its bundles have nothing in common.
    # Clients that evaluate an averaged model have seldom the one before.
    once = name in EDEN or outgoing.kind == pb.RESOURCE_KIND_AVERAGED
    differs = config.encodings.difference == "previous" and not once
    outgoing = replace(outgoing, word=_word(outgoing.layout, name) if differs else 0)
    if name == PLAIN.name:
        return outgoing
    key = encoding_key(config.seed, "broadcast", round_, kind_name(outgoing.kind))
    return replace(outgoing, encoding=EncodingSpec(name), key=key)


def _word(layout: Layout, encoding: str) -> int:
    """Bytes of a word of differences between two bundles of a layout in an encoding."""
    if encoding in _WORDS:
        return _WORDS[encoding]
    sizes = {entry.dtype.itemsize: 0 for entry in layout.entries} or {1: 0}
    for entry in layout.entries:
        sizes[entry.dtype.itemsize] += entry.nbytes
    return max(sizes, key=lambda size: sizes[size])


def check_encodable(outgoing: Outgoing, after: int) -> None:
    """Raises Diverged if the encoding cannot hold the values. after: the round that computed them."""
    if outgoing.encoding == PLAIN or all(
        _small(outgoing.tensors[entry.name]) for entry in outgoing.layout.entries if entry.trainable
    ):
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


@dataclass(frozen=True, slots=True)
class ExchangeBundles:
    """Makes the bundles that the clients of a round are sent after the snapshot of the round before."""

    config: RunConfig
    algorithm: fl.Algorithm
    """The method with its parameters of the round."""
    layout: Layout
    """The layout of the model, with its buffers."""
    trainable: Layout
    frozen: fl.Tensors
    """Tensors that no client trains, if they are sent."""

    def outgoing(self, snapshot: Snapshot, exchange: int, sums: Mapping[str, fl.Tensors]) -> list[Outgoing]:
        """Model; direction, optimizer's state and frozen parts if any. sums: of the round's earlier exchanges."""
        model = {**snapshot.parameters, **snapshot.buffers}
        sent = [Outgoing(pb.RESOURCE_KIND_MODEL, model, self.layout)]
        direction = self._direction(snapshot, exchange, sums)
        if direction is not None:
            sent.append(Outgoing(pb.RESOURCE_KIND_DIRECTION, direction, self.trainable))
        if self.algorithm.exchanges[exchange].trains:
            averaged = averaged_state(self.algorithm, snapshot.state, snapshot.round + 1)
            layout = master_layout(self.trainable)
            sent += [
                Outgoing(pb.RESOURCE_KIND_OPTIMIZER, tensors, layout, symbol.removeprefix(PREFIX))
                for symbol, tensors in averaged.items()
            ]
        if self.frozen:
            sent.append(Outgoing(pb.RESOURCE_KIND_FROZEN, self.frozen, Layout.of(self.frozen)))
        return [in_encoding(bundle, self.config, snapshot.round + 1) for bundle in sent]

    def _direction(self, snapshot: Snapshot, exchange: int, sums: Mapping[str, fl.Tensors]) -> fl.Tensors | None:
        return self.algorithm.exchanges[exchange].direction(snapshot.state, sums)

    def received_direction(
        self, snapshot: Snapshot, exchange: int, sums: Mapping[str, fl.Tensors]
    ) -> dict[str, fl.Tensors]:
        """The direction that the clients of an exchange received, if it differs from the server's: it was encoded."""
        if self.config.encodings.direction == "plain":
            return {}
        sent = direction_of(self.outgoing(snapshot, exchange, sums))
        return {} if sent is None else {SENT: sent}

    def check(self, snapshot: Snapshot, exchange: int, sums: Mapping[str, fl.Tensors]) -> None:
        """Raises Diverged if the model's dtype or an encoding cannot hold what an exchange of the next round sends."""
        low = snapshot.state.dtypes
        if not low and self.config.encodings.plain_down:
            return
        after = snapshot.round + bool(exchange)
        direction = self._direction(snapshot, exchange, sums)
        if low and direction is not None:
            check_finite(f"the direction as {dtype_names(low)}", direction, after)
        for outgoing in self.outgoing(snapshot, exchange, sums):
            check_encodable(outgoing, after)


def direction_of(outgoing: list[Outgoing]) -> fl.Tensors | None:
    """The direction among the bundles of an exchange as clients receive it, on the host; None if there is none."""
    found = (bundle for bundle in outgoing if bundle.kind == pb.RESOURCE_KIND_DIRECTION)
    return next((tree.to(bundle.received(bundle.bundle()), CPU) for bundle in found), None)


def dtype_names(dtypes: Mapping[str, torch.dtype]) -> str:
    """The dtypes of some parameters in words."""
    return " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes.values()}))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Broadcast:
    """One resource as it goes over the wire."""

    resource: pb.Resource
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
    resource = pb.Resource(
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


def plain_broadcast(kind: pb.ResourceKind, data: Buffer, chunk_bytes: int, name: str = "") -> Broadcast:
    """The broadcast of bytes that are no tensors: of a difference that makes a resource, or the files of a release."""
    digest = digest_of(data)
    own = pb.Resource(
        kind=kind,
        digest=digest_message(digest),
        size_bytes=len(data),
        encoding=pb.ENCODING_PLAIN,
        name=name,
    )
    header = encode_fetch_header(own, pb.Manifest(size_bytes=len(data), encoding=pb.ENCODING_PLAIN))
    return Broadcast(own, digest, digest, header, data, _checksums(data, chunk_bytes), chunk_bytes)


def _described(difference: Broadcast, base: Broadcast, word: int) -> pb.Difference:
    """A difference as the resource that it makes names it."""
    own = difference.resource
    return pb.Difference(base=base.resource.digest, digest=own.digest, size_bytes=own.size_bytes, word_bytes=word)


def _checksums(data: Buffer, chunk_bytes: int) -> tuple[int, ...]:
    """CRC-32C of the chunks of some bytes."""
    view = memoryview(data)
    spans = chunk_spans(len(view), chunk_bytes)
    return tuple(crc32c(view[offset : offset + length]) for offset, length in spans)
