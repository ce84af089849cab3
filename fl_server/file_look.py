"""A whole update on disk, read once: its digest, and how long its tensors are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import blake3
import torch
from torch import Tensor

from fl_server.spool import UpdateFile
from protos.codec import Entry

READ_BYTES = 1 << 20
"""In memory at a time, beside the same values as float64."""


class Span(NamedTuple):
    """Bytes [start, end) of a file: values of a tensor, or what nothing is summed of."""

    start: int
    end: int
    entry: int | None
    """Place of the tensor among the entries."""


def look_through(path: Path, entries: tuple[Entry, ...]) -> tuple[bytes, list[float]]:
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
            for span in spans:
                if span.entry is not None:
                    piece = data[span.start - start : span.end - start]
                    sums[span.entry] += _square(piece, entries[span.entry], wide)
    return hasher.digest(), sums


def _square(raw: memoryview, entry: Entry, wide: Tensor) -> float:
    """The sum of squares of a block, widened in memory that is there already."""
    values = torch.frombuffer(raw, dtype=entry.dtype)
    block = wide[: len(values)].copy_(values)
    return float(torch.dot(block, block))


def _spans(entries: Iterable[Entry], size: int) -> Iterator[Span]:
    """The whole file, cut into blocks of tensors and what lies between; none is longer than a read."""
    at = 0
    for index, entry in enumerate(entries):
        if not entry.dtype.is_floating_point:
            continue
        yield from _cut(Span(at, entry.offset, None))
        yield from _cut(Span(entry.offset, entry.end, index), entry.dtype.itemsize)
        at = entry.end
    yield from _cut(Span(at, size, None))


def _cut(span: Span, itemsize: int = 1) -> Iterator[Span]:
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
