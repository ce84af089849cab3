"""Reads a whole update on disk once, encoded or not: its digest and the norms of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import blake3
import torch
from torch import Tensor

from fl_server.aggregation.updates import EncodedUpdate, Part, PayloadShape, UpdateShape
from fl_server.store.spool.part_file import UpdateFile
from protos.codec import Entry
from protos.encodings import EncodingError

READ_BYTES = 1 << 20
"""Bytes in memory at a time; the same values are also there as float64."""


class Span(NamedTuple):
    """Bytes [start, end) of a file: values of a tensor, or the gap before one."""

    start: int
    end: int
    entry: int
    """Place of the tensor among the entries."""
    dtype: torch.dtype | None = None
    """The dtype of the values; None: these bytes are not summed."""


def digest_and_norms(path: Path, entries: tuple[Entry, ...]) -> tuple[bytes, list[float]]:
    """BLAKE3-256 of the file, and for each entry, by rising offset, the sum of the squares of its values.

    Sums are made in float64, block by block of the tensor, so no float32 value overflows them and one that is not
    finite makes its sum not finite; 0 for integers and bools. Raises StoreError for a file that is shorter than that.
    """
    hasher, sums = blake3.blake3(), [0.0] * len(entries)
    with UpdateFile(path) as file:
        size = max(file.size_bytes, entries[-1].end if entries else 0)
        buffer = memoryview(bytearray(min(size, READ_BYTES)))
        wide = torch.empty(len(buffer) // 2 + 1, dtype=torch.float64)
        for spans in _reads(_spans(entries, size)):
            start, end = spans[0].start, spans[-1].end
            data = buffer[: end - start]
            file.read_into(start, data)
            hasher.update(data)
            for dtype, alike in groupby(spans, attrgetter("dtype")):
                if dtype is not None:
                    run = list(alike)
                    values = torch.frombuffer(data[run[0].start - start : run[-1].end - start], dtype=dtype)
                    for span, square in zip(run, _squares(values, run, wide), strict=True):
                        sums[span.entry] += square
    return hasher.digest(), sums


def _squares(values: Tensor, run: list[Span], wide: Tensor) -> list[float]:
    """The sum of squares of each of the blocks that the values are of, widened in memory that is there already.

    All together: each call of torch lets go of the interpreter, and waits for it again.
    """
    lengths = [(span.end - span.start) // values.itemsize for span in run]
    blocks = wide[: len(values)].copy_(values).split(lengths)
    return torch.stack([torch.dot(block, block) for block in blocks]).tolist()


def _spans(entries: Sequence[Entry], size: int) -> Iterator[Span]:
    """The whole file, cut into blocks of tensors and what lies between; none is longer than a read."""
    at = 0
    for index, entry in enumerate(entries):
        if not entry.dtype.is_floating_point:
            continue
        yield from _cut(Span(at, entry.offset, index))
        yield from _cut(Span(entry.offset, entry.end, index, entry.dtype))
        at = entry.end
    yield from _cut(Span(at, size, len(entries)))


def _cut(span: Span) -> Iterator[Span]:
    itemsize = 1 if span.dtype is None else span.dtype.itemsize
    step = READ_BYTES // itemsize * itemsize
    for start in range(span.start, span.end, step):
        yield span._replace(start=start, end=min(start + step, span.end))


def _reads(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Spans that are read together: as many as fit."""
    together: list[Span] = []
    for span in spans:
        if together and span.end - together[0].start > READ_BYTES:
            yield together
            together = []
        together.append(span)
    if together:
        yield together


VALUES = 1 << 17
"""Values that are decoded at a time: a multiple of the blocks of every encoding."""


def digest_and_norms_of_encoded(update: EncodedUpdate) -> tuple[bytes, list[float], str]:
    """The results of `digest_and_norms` for an encoded update; and what is wrong with its bytes, empty if nothing is.

    The digest is that of the bytes of the file. Sums are made of the decoded values, and of none after the first wrong
    byte. Raises StoreError for a file that is too short.
    """
    sums = [0.0] * len(update.shape.entries)
    with UpdateFile(update.path) as file:
        reads, wrong = HashedReads(file), ""
        try:
            for entry, part in _parts(update):
                values = update.decoded(part, reads.read).double()
                sums[entry] += float(torch.dot(values, values))
        except EncodingError as error:
            wrong = str(error)
        return reads.digest(), sums, wrong


def _parts(update: EncodedUpdate) -> Iterator[tuple[int, Part]]:
    """All floating tensors in pieces, by rising offset, each with the place of its tensor among the entries."""
    place = 0
    for payload in update.shape.payloads:
        for number, entry in enumerate(payload.layout.entries):
            count = entry.numel if entry.dtype.is_floating_point else 0
            yield from ((place, part) for part in _pieces(payload, number, count))
            place += 1


def _pieces(payload: PayloadShape, number: int, count: int) -> Iterator[Part]:
    return (Part(payload, number, start, min(VALUES, count - start)) for start in range(0, count, VALUES))


class HashedReads:
    """Reads of a file by offsets that do not fall; each byte of it is read and hashed once."""

    def __init__(self, file: UpdateFile) -> None:
        self._file, self._hasher = file, blake3.blake3()
        self._start, self._kept = 0, bytearray()
        """The latest bytes, which may be asked for again, and their offset."""

    def read(self, offset: int, size: int) -> memoryview:
        """`size` bytes from `offset` on; fewer at the end of the file."""
        if offset < self._start:
            raise ValueError(f"expected offsets that do not fall, got {offset} after {self._start}")
        while self._end < min(offset + size, self._file.size_bytes):
            self._advance(offset)
        return memoryview(self._kept)[offset - self._start :][:size]

    def digest(self) -> bytes:
        """BLAKE3-256 of the whole file."""
        while self._end < self._file.size_bytes:
            self._advance(self._end)
        return self._hasher.digest()

    @property
    def _end(self) -> int:
        return self._start + len(self._kept)

    def _advance(self, offset: int) -> None:
        """Read on. Bytes before `offset` are not kept."""
        data = bytearray(min(READ_BYTES, self._file.size_bytes - self._end))
        self._file.read_into(self._end, data)
        self._hasher.update(data)
        dropped = min(offset - self._start, len(self._kept))
        self._start, self._kept = self._start + dropped, self._kept[dropped:] + data


class UpdateContent(NamedTuple):
    """What admission has to know of the bytes of an update."""

    digest: bytes
    """BLAKE3-256 of the file."""
    squares: Sequence[float]
    """The sums for each tensor, by rising offset: the sum of the squares of its values; 0 for integers and bools."""
    wrong: str = ""
    """What is wrong with encoded bytes; empty if nothing is."""


def read_update(update: Path | EncodedUpdate, shape: UpdateShape) -> UpdateContent:
    """Read an update of this shape. Raises StoreError for a file that is too short."""
    if isinstance(update, EncodedUpdate):
        return UpdateContent(*digest_and_norms_of_encoded(update))
    return UpdateContent(*digest_and_norms(update, shape.entries))
