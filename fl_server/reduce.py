"""From the spool to sums: updates are read block by block, so memory does not grow with the cohort.

Every block of every update is read once (pread; a mapped file would count as resident memory), in the order of client
ids, and enters all the sums that the algorithm asked for. Cutting into blocks changes no bit (`algorithms.aggregate`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

import algorithms as fl
from fl_server.shapes import UpdateShape
from fl_server.store.files import disk_errors
from protos.codec import Entry, Layout, unpack

BLOCK_BYTES = 512 << 10
"""One block of one update: larger ones fall out of a CPU's cache, smaller ones cost more calls than they save."""


def sum_payloads(
    paths: Sequence[Path], shape: UpdateShape, wanted: Mapping[str, fl.WeightedSum]
) -> dict[str, fl.Tensors]:
    """The sums by name; each payload is read once for all the sums over it."""
    totals: dict[str, fl.Tensors] = {}
    for payload in {row.payload: None for row in wanted.values()}:
        names = [name for name, row in wanted.items() if row.payload == payload]
        rows = [wanted[name].coefficients for name in names]
        totals.update(zip(names, sum_updates(paths, shape.layout_of(payload), rows), strict=True))
    return totals


def sum_updates(paths: Sequence[Path], layout: Layout, rows: Sequence[Sequence[float]]) -> list[fl.Tensors]:
    """For each row the weighted sum of the trainable tensors of the updates.

    Args:
        paths: one file an update, all of this layout, in the order of client id bytes.
        layout: of each file.
        rows: coefficients, one for each path.

    Raises:
        OSError, LayoutError: a file is gone or too short.
    """
    sums: list[fl.Tensors] = [{} for _ in rows]
    for entry in layout.entries:
        if entry.trainable:
            wholes = by_block(paths, entry, lambda blocks: fl.weighted_sums(blocks, rows))
            for total, whole in zip(sums, wholes, strict=True):
                total[entry.name] = whole
    return sums


def average_buffers(paths: Sequence[Path], layout: Layout, weights: Sequence[float]) -> fl.Tensors:
    """The buffers after a round: floating ones averaged plainly, integers at their maximum."""

    def mean(blocks: Iterator[torch.Tensor]) -> list[torch.Tensor]:
        return fl.weighted_sums(blocks, [weights])

    def largest(blocks: Iterator[torch.Tensor]) -> list[torch.Tensor]:
        return [fl.maximum(blocks)]

    averaged: fl.Tensors = {}
    for entry in layout.entries:
        if not entry.trainable:
            [averaged[entry.name]] = by_block(paths, entry, mean if entry.dtype.is_floating_point else largest)
    return averaged


def by_block(
    paths: Sequence[Path],
    entry: Entry,
    reduce: Callable[[Iterator[torch.Tensor]], list[torch.Tensor]],
    entries: int = 0,
) -> list[torch.Tensor]:
    """`reduce` of each block of a tensor over all updates, its answers put together: as many tensors as it gives.

    An empty tensor has one empty block. entries: of a block; 0: BLOCK_BYTES of them.
    """
    per_block = entries or max(1, BLOCK_BYTES // entry.dtype.itemsize)
    wholes: list[torch.Tensor] = []
    for start in range(0, max(entry.numel, 1), per_block):
        count = min(per_block, entry.numel - start)
        pieces = reduce(_read(path, entry, start, count) for path in paths)
        wholes = wholes or [torch.empty(entry.numel, dtype=piece.dtype) for piece in pieces]
        for whole, piece in zip(wholes, pieces, strict=True):
            whole[start : start + count] = piece
    return [whole.view(entry.shape) for whole in wholes]


def _read(path: Path, entry: Entry, start: int, count: int) -> torch.Tensor:
    """`count` elements of a tensor from element `start` on, flat. Opened for each block: a cohort may be large."""
    with disk_errors(f"read the update {path}"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            raw = os.pread(descriptor, count * entry.dtype.itemsize, entry.offset + start * entry.dtype.itemsize)
        finally:
            os.close(descriptor)
    block = Entry(entry.name, entry.dtype, (count,), 0, entry.trainable)
    return unpack(raw, Layout((block,), block.nbytes))[entry.name]
