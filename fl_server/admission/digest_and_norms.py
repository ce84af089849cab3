"""Digest and tensor norms of a whole update on disk, in one read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import blake3
import torch
from torch import Tensor

from fl_server.store.spool.part_file import UpdateFile
from protos.codec import Entry

READ_BYTES = 1 << 20
"""Bytes in memory at a time; the same values are also there as float64."""


class Span(NamedTuple):
    """Bytes [start, end) of a file: values of a tensor, or the gap before one."""

    start: int
    end: int
    entry: int
    """Place of the tensor among the entries."""
    dtype: torch.dtype | None = None
    """Of the values; None: these bytes are not summed."""


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
