"""An update in an encoding: the keys of its random numbers, and its values, decoded range by range."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

import algorithms as fl
from algorithms.reference import KnownPart
from fl_server.aggregation.bundles import CPU
from fl_server.aggregation.updates import FILES, HeldUpdate, PayloadShape, Source, UpdateShape, reads_of
from fl_server.rounds.sampling import training_seed
from fl_server.run_settings.config import RunConfig
from fl_server.store.spool.part_file import StoredUpdate
from protos.codec import Entry
from protos.encodings import decode_range, encoding_key


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


Read = Callable[[int, int], bytes | memoryview]
"""(offset in the file, size) -> bytes of it."""


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
