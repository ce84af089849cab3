"""Reads updates block by block, so that memory does not grow with the cohort.

An update is a file of the spool, or in the memory of a device (a simulation there). Every block of a file is read once
with pread: a mapped file would count as resident memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from fl_server.store.files import disk_errors
from protos.codec import Entry, Layout, unpack

BLOCK_BYTES = 512 << 10
"""Bytes of one update in a block: larger blocks do not fit a CPU's cache, and smaller ones cost more calls."""


CPU = torch.device("cpu")


class HeldUpdate(Protocol):
    """A whole update in the memory of a device, with the layout of a file."""

    @property
    def device(self) -> torch.device:
        """Where it is."""
        ...

    def read(self, entry: Entry, start: int, count: int) -> torch.Tensor:
        """`count` elements of a tensor from element `start` on, flat, on the device. They are not to be changed."""
        ...


Source = Path | HeldUpdate
"""One update."""


def device_of(sources: Sequence[Source]) -> torch.device:
    """Where updates are summed: on the device that has all of them, else on the CPU."""
    devices = {CPU if isinstance(source, Path) else source.device for source in sources}
    return devices.pop() if len(devices) == 1 else CPU


def by_block(  # noqa: PLR0913, PLR0917 - what is read, and how it is reduced
    sources: Sequence[Source],
    entry: Entry,
    reduce: Callable[[Iterator[torch.Tensor]], list[torch.Tensor]],
    entries: int = 0,
    device: torch.device = CPU,
) -> list[torch.Tensor]:
    """Apply `reduce` to each block of a tensor over all updates; returns as many whole tensors as it returns blocks.

    An empty tensor has one empty block. The whole tensors are on the CPU.

    entries: of a block; 0: BLOCK_BYTES of them, and on another device than a CPU all.
    device: of the blocks.
    """
    usual = max(1, BLOCK_BYTES // entry.dtype.itemsize) if device.type == "cpu" else max(1, entry.numel)
    per_block = entries or usual
    wholes: list[torch.Tensor] = []
    for start in range(0, max(entry.numel, 1), per_block):
        count = min(per_block, entry.numel - start)
        pieces = reduce(read_block(source, entry, start, count).to(device) for source in sources)
        wholes = wholes or [torch.empty(entry.numel, dtype=piece.dtype) for piece in pieces]
        for whole, piece in zip(wholes, pieces, strict=True):
            whole[start : start + count] = piece
    return [whole.view(entry.shape) for whole in wholes]


def neighbours(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries in groups to be read at once: of one dtype, without gaps, and together no longer than a block.

    A cohort of thousands is opened once for a group instead of once for each small tensor.
    """
    groups: list[list[Entry]] = []
    for entry in entries:
        last = groups[-1] if groups else []
        fits = last and (last[-1].dtype, last[-1].end) == (entry.dtype, entry.offset)
        if fits and sum(each.numel for each in (*last, entry)) * entry.dtype.itemsize <= BLOCK_BYTES:
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
    return _read(source, entry, start, count) if isinstance(source, Path) else source.read(entry, start, count)


def _read(path: Path, entry: Entry, start: int, count: int) -> torch.Tensor:
    with disk_errors(f"read the update {path}"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            raw = os.pread(descriptor, count * entry.dtype.itemsize, entry.offset + start * entry.dtype.itemsize)
        finally:
            os.close(descriptor)
    block = Entry(entry.name, entry.dtype, (count,), 0, entry.trainable)
    return unpack(raw, Layout((block,), block.nbytes))[entry.name]
