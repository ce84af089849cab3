"""The updates of an exchange: their byte layout and encoding, and reading them block by block.

An update is a file of the spool, or in an object store, or in the memory of a device (a simulation there). Every block
of a file is read once with pread, because a mapped file would count as resident memory. So memory does not grow with
the cohort.

Of an update in an encoding, the keys of its random numbers are made here, and its values are decoded range by range.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

import algorithms as fl
from algorithms.reference import KnownPart
from fl_server.aggregation.task_model import CPU
from fl_server.rounds.sampling import training_seed
from fl_server.run_settings.config import RunConfig
from fl_server.store.errors import disk_errors
from fl_server.store.spool.part_file import StoredUpdate
from protos.codec import Entry, Layout, LayoutError, unpack
from protos.encodings import PLAIN, EncodedLayout, EncodingSpec, decode_range, encoding_key
from protos.fl.v1.tensor_pb2 import Manifest
from protos.fl.v1.training_pb2 import PayloadKind
from protos.wire import payload_kind, payload_name

BLOCK_BYTES = 512 << 10
"""Bytes of one update in a block: larger blocks do not fit a CPU's cache, and smaller ones cost more calls."""
TOGETHER_BYTES = 1 << 20
"""The bytes of a block of all updates in float64: up to this size, one call for all is faster than one for each."""
HASHED_BYTES = 1 << 20
"""Bytes in memory at a time for a digest."""
DEVICE_BYTES = 256 << 20
"""The bytes of one update in a group of neighbours on another device, where only calls cost."""
FILES = (Path, StoredUpdate)
"""The sources whose bytes are those of the wire."""
_NONE: Mapping[fl.Payload, Layout] = MappingProxyType({})
Read = Callable[[int, int], bytes | memoryview]
"""(offset in the file, size) -> bytes of it."""


class HeldUpdate(Protocol):
    """A whole update in the memory of a device, with the layout of a file."""

    @property
    def device(self) -> torch.device:
        """The device that holds it."""
        ...

    def read(self, entry: Entry, start: int, count: int) -> torch.Tensor:
        """`count` elements of a tensor from element `start` on, flat, on the device. They are not to be changed."""
        ...

    def read_with(self, others: Sequence[object], entry: Entry, start: int, count: int) -> torch.Tensor | None:
        """The same of some updates in memory of its own, [updates, count], if they can be read at once; else None."""
        del others, entry, start, count
        return None


Source = Path | StoredUpdate | HeldUpdate
"""One update."""


def device_of(sources: Sequence[Source]) -> torch.device:
    """Updates are summed on the device that has all of them, else on the CPU."""
    devices = {CPU if isinstance(source, FILES) else source.device for source in sources}
    return devices.pop() if len(devices) == 1 else CPU


def by_block(  # noqa: PLR0913, PLR0917 - what is read, and how it is reduced
    sources: Sequence[Source],
    entry: Entry,
    reduce: Callable[[Iterable[torch.Tensor]], list[torch.Tensor]],
    entries: int = 0,
    device: torch.device = CPU,
) -> list[torch.Tensor]:
    """Apply `reduce` to each block of a tensor over all updates; returns as many whole tensors as it returns blocks.

    An empty tensor has one empty block.

    entries: of a block; 0: BLOCK_BYTES of them, and on another device than a CPU all.
    device: of the blocks and of the whole tensors.
    """
    usual = max(1, BLOCK_BYTES // entry.dtype.itemsize) if device.type == "cpu" else max(1, entry.numel)
    per_block = entries or usual
    wholes: list[torch.Tensor] = []
    for start in range(0, max(entry.numel, 1), per_block):
        count = min(per_block, entry.numel - start)
        pieces = reduce(_blocks(sources, entry, start, count, device))
        if count == entry.numel:
            return [piece.view(entry.shape) for piece in pieces]
        wholes = wholes or [torch.empty(entry.numel, dtype=piece.dtype, device=device) for piece in pieces]
        for whole, piece in zip(wholes, pieces, strict=True):
            whole[start : start + count] = piece
    return [whole.view(entry.shape) for whole in wholes]


def _blocks(  # noqa: PLR0913, PLR0917 - as `by_block`
    sources: Sequence[Source], entry: Entry, start: int, count: int, device: torch.device
) -> Iterable[torch.Tensor]:
    """A block of each update, in order; as one tensor if they are held together and small."""
    first, most = sources[0] if sources else None, TOGETHER_BYTES if device.type == "cpu" else DEVICE_BYTES
    if first is not None and not isinstance(first, FILES) and 8 * count * len(sources) <= most:
        together = first.read_with(sources, entry, start, count)
        if together is not None:
            return together
    return (read_block(source, entry, start, count).to(device) for source in sources)


def neighbours(entries: Sequence[Entry], device: torch.device = CPU) -> list[list[Entry]]:
    """Entries in groups to be read at once: of one dtype, without gaps, and together no longer than a block.

    A cohort of thousands is opened once for a group instead of once for each small tensor. device: of the sums.
    """
    most = BLOCK_BYTES if device.type == "cpu" else DEVICE_BYTES
    groups: list[list[Entry]] = []
    for entry in entries:
        last = groups[-1] if groups else []
        fits = last and (last[-1].dtype, last[-1].end) == (entry.dtype, entry.offset)
        if fits and sum(neighbour.numel for neighbour in (*last, entry)) * entry.dtype.itemsize <= most:
            last.append(entry)
        else:
            groups.append([entry])
    return groups


def joined(entries: Sequence[Entry]) -> Entry:
    """A group of neighbours as one flat tensor."""
    first = entries[0]
    if len(entries) == 1:
        return first
    count = sum(entry.numel for entry in entries)
    return Entry(first.name, first.dtype, (count,), first.offset, first.trainable)


def read_block(source: Source, entry: Entry, start: int, count: int) -> torch.Tensor:
    """`count` elements of a tensor from element `start` on, flat. They are not to be changed.

    Files are opened for each block: a cohort may be large. Raises StoreError, LayoutError: a file is gone or too short.
    """
    if not isinstance(source, FILES):
        return source.read(entry, start, count)
    itemsize = entry.dtype.itemsize
    offset, size = entry.offset + start * itemsize, count * itemsize
    if isinstance(source, StoredUpdate) or entry.dtype == torch.bool or not size:
        with reads_of(source) as read:
            raw = read(offset, size)
        return unpack(raw, Layout((Entry(entry.name, entry.dtype, (count,), 0, entry.trainable),), size))[entry.name]
    return torch.from_numpy(_bytes_of(source, offset, size)).view(entry.dtype)


def _bytes_of(path: Path, offset: int, size: int) -> NDArray[np.uint8]:
    """Bytes of a file, read into memory of their own. Raises StoreError, LayoutError."""
    data = np.empty(size, np.uint8)
    with disk_errors(f"read the update {path}"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            came = os.preadv(descriptor, [data.data], offset)
        finally:
            os.close(descriptor)
    if came != size:
        raise LayoutError(f"expected a buffer of {size} bytes, got {came}")
    return data


@contextmanager
def reads_of(source: Path | StoredUpdate) -> Iterator[Callable[[int, int], bytes]]:
    """Reads bytes of an update, by offset and size."""
    if isinstance(source, StoredUpdate):
        yield source.read
        return
    with disk_errors(f"read the update {source}"):
        descriptor = os.open(source, os.O_RDONLY)
        try:
            yield lambda offset, size: os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)


def digest_of_source(source: Path | StoredUpdate) -> bytes:
    """BLAKE3-256 of an update's bytes. Raises StoreError."""
    hasher, at = blake3(), 0
    with reads_of(source) as read:
        while data := read(at, HASHED_BYTES):
            hasher.update(data)
            at += len(data)
    return hasher.digest()


@dataclass(frozen=True)
class PayloadShape:
    """One payload's position in an update."""

    payload: fl.Payload
    layout: Layout
    """Offsets from the start of the payload, without an encoding."""
    base: int
    """Bytes before it in the update, without an encoding."""
    encoding: EncodingSpec = PLAIN
    encoded_base: int = 0
    """Bytes before it in the file of an encoded update."""

    @property
    def kind(self) -> PayloadKind:
        """The kind on the wire."""
        return payload_kind(self.payload)

    @property
    def name(self) -> str:
        """The name on the wire, of a payload of the kind NAMED."""
        return payload_name(self.payload)

    @cached_property
    def encoded(self) -> EncodedLayout:
        """Its layout on the wire and in its file, with offsets from the start of the payload."""
        return EncodedLayout.of(self.layout, self.encoding)

    @cached_property
    def manifest(self) -> Manifest:
        """Its manifest in a header."""
        return self.encoded.to_manifest()

    @cached_property
    def placed(self) -> Layout:
        """Its layout with offsets from the start of the update, without an encoding, for reading its values."""
        entries = tuple(replace(entry, offset=entry.offset + self.base) for entry in self.layout.entries)
        return Layout(entries, self.layout.size_bytes + self.base)


@dataclass(frozen=True)
class UpdateShape:
    """The payloads of an exchange, in the exchange's order."""

    payloads: tuple[PayloadShape, ...]

    @staticmethod
    def of(
        payloads: Sequence[fl.Payload],
        model: Layout,
        trainable: Layout,
        wide: Mapping[fl.Payload, Layout] = _NONE,
    ) -> UpdateShape:
        """Deltas are laid out as the model, buffers included; every other payload as its trainable tensors alone.

        wide: the layouts of payloads that are not in the model's dtypes.
        """
        shapes: list[PayloadShape] = []
        base = 0
        for payload in payloads:
            layout = model if payload == "delta" else wide.get(payload, trainable)
            shapes.append(PayloadShape(payload, layout, base))
            base += layout.size_bytes
        return UpdateShape(tuple(shapes))

    @staticmethod
    def of_exchange(model: Layout, trainable: Layout, state: Layout, exchange: fl.Exchange) -> UpdateShape:
        """The update of an exchange. state: the layout of payloads whose rule is wide."""
        wide = {payload: state for payload, rule in exchange.computed.items() if rule.wide}
        return UpdateShape.of(exchange.payloads, model, trainable, wide)

    def encoded_as(self, encoding: EncodingSpec) -> UpdateShape:
        """The same update in an encoding; some payloads stay plain (`EncodingSpec.of_payload`)."""
        shapes: list[PayloadShape] = []
        base = 0
        for payload in self.payloads:
            shapes.append(replace(payload, encoding=encoding.of_payload(payload.payload), encoded_base=base))
            base += shapes[-1].encoded.size_bytes
        return UpdateShape(tuple(shapes))

    @cached_property
    def size_bytes(self) -> int:
        """Size of the whole update on the wire and in its file."""
        return sum(shape.encoded.size_bytes for shape in self.payloads)

    @property
    def plain(self) -> bool:
        """Whether the values in the file need no decoding."""
        return all(shape.encoding == PLAIN for shape in self.payloads)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """All tensors, with offsets from the start of the update."""
        return tuple(entry for shape in self.payloads for entry in shape.placed.entries)

    @cached_property
    def trains(self) -> bool:
        """Whether the update has a delta."""
        return any(shape.payload == "delta" for shape in self.payloads)

    @cached_property
    def has_buffers(self) -> bool:
        """Whether its delta has buffers."""
        return self.trains and any(not entry.trainable for entry in self.layout_of("delta").entries)

    def only(self, names: Collection[str]) -> UpdateShape:
        """The same update with these tensors only; their offsets stay."""
        wanted = set(names)
        return UpdateShape(tuple(replace(shape, layout=_only(shape.layout, wanted)) for shape in self.payloads))

    def layout_of(self, payload: fl.Payload) -> Layout:
        """The layout of a payload's tensors in the update. Raises KeyError for another payload."""
        for shape in self.payloads:
            if shape.payload == payload:
                return shape.placed
        raise KeyError(f"expected one of {[shape.payload for shape in self.payloads]}, got {payload}")


@dataclass(frozen=True, slots=True)
class AcceptedUpdates:
    """The accepted updates of an exchange, in the order of client id bytes."""

    cohort: Sequence[fl.UpdateInfo]
    sources: Sequence[Source]
    shape: UpdateShape

    def only(self, names: Collection[str]) -> AcceptedUpdates:
        """The same updates with these tensors only."""
        return replace(self, shape=self.shape.only(names))


def buffers_in(shape: UpdateShape) -> list[Entry]:
    """The buffers of an update by rising offset, which is that in its plain layout; empty without any."""
    return [entry for entry in shape.layout_of("delta").entries if not entry.trainable] if shape.has_buffers else []


def _only(layout: Layout, names: Collection[str]) -> Layout:
    return replace(layout, entries=tuple(entry for entry in layout.entries if entry.name in names))


class UpdateKeys:
    """The keys of one client's update in an exchange, by payload. Clients derive the same ones from their seed."""

    def __init__(self, seed: int, exchange: int) -> None:
        """seed: the client's training seed of the round."""
        self._seed, self._exchange = seed, exchange
        self._made: dict[str, bytes] = {}

    @classmethod
    def of(cls, config: RunConfig, round_: int, exchange: int, client: str) -> UpdateKeys:
        """The keys of a client in a round of a run."""
        return cls(training_seed(config.seed, round_, client), exchange)

    def of_payload(self, payload: fl.Payload) -> bytes:
        """The key of one payload."""
        if payload not in self._made:
            self._made[payload] = encoding_key(self._seed, "update", self._exchange, payload)
        return self._made[payload]


class Decoding(NamedTuple):
    """The keys of its payloads, and the part of the delta that was not sent."""

    keys: UpdateKeys
    known: KnownPart | None = None
    """None: the whole delta was sent."""


class Part(NamedTuple):
    """Neighbouring values of one tensor."""

    payload: PayloadShape
    number: int
    """The tensor's number in the payload's layout."""
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class EncodedUpdate(HeldUpdate):
    """One client's update; see `fl_server.aggregation.updates.HeldUpdate`. Entries have the offsets of plain bytes.

    Only the encoded blocks that cover a range are read and decoded, so no decoded update is ever whole in memory.
    """

    source: Path | StoredUpdate
    shape: UpdateShape
    """The shape of the whole update, with encoded layouts."""
    decoding: Decoding

    @property
    def path(self) -> Path:
        """The path of its file, which may be in the object store only."""
        return self.source if isinstance(self.source, Path) else self.source.path

    @property
    def device(self) -> torch.device:
        """The device on which it is decoded."""
        return CPU

    def read(self, entry: Entry, start: int, count: int) -> torch.Tensor:
        """See `HeldUpdate.read`. The entry may be a group of neighbours.

        The file is opened for each call: a cohort may be large. Raises StoreError, EncodingError: it is gone, too
        short or damaged.
        """
        if not count:
            return torch.empty(0, dtype=entry.dtype)
        with reads_of(self.source) as read:
            parts = [self.decoded(part, read) for part in parts_of(self.shape, entry, start, count)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def decoded(self, part: Part, read: Read) -> torch.Tensor:
        """The values of a part, from the file's bytes."""
        payload, decoding = part.payload, self.decoding
        values = decode_range(
            lambda offset, size: read(payload.encoded_base + offset, size),
            payload.encoded,
            part.number,
            part.start,
            part.length,
            decoding.keys.of_payload(payload.payload),
        )
        entry = payload.layout.entries[part.number]
        if decoding.known is None or payload.payload != "delta" or not entry.trainable:
            return values
        return decoding.known.added_to_part(values, entry.name, part.start)


def opened(sources: Sequence[Source], shape: UpdateShape, decoding: Callable[[int], Decoding]) -> Sequence[Source]:
    """Updates whose values can be read: those in an encoding are decoded wherever they are.

    decoding: of the update with a number.
    """
    if shape.plain:
        return sources
    return [
        EncodedUpdate(source, shape, decoding(number)) if isinstance(source, FILES) else source
        for number, source in enumerate(sources)
    ]


def parts_of(shape: UpdateShape, entry: Entry, start: int, count: int) -> Iterator[Part]:
    """The tensors that a range of an entry, or of a group of neighbours, consists of. count: over 0."""
    size = entry.dtype.itemsize
    at, end = entry.offset + start * size, entry.offset + (start + count) * size
    payload = shape.payloads[bisect_right([each.base for each in shape.payloads], at) - 1]
    entries = payload.placed.entries
    number = bisect_right(entries, at, key=lambda each: each.offset) - 1
    while at < end:
        here = entries[number]
        if here.end > at:  # an empty tensor begins where the next one does
            until = min(end, here.end)
            yield Part(payload, number, (at - here.offset) // size, (until - at) // size)
            at = until
        number += 1
