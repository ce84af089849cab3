"""The plain mean: weighted sums of updates, and the average of their buffers.

Each payload is read once for all sums over it, in the order of client ids. Cutting tensors into blocks changes no bit
(`algorithms.aggregate`). Updates in the memory of a device are summed there: each operation rounds one number, so the
bits are those of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

import algorithms as fl
from algorithms.aggregate import mean_of_buffers
from fl_server.aggregation.blocks import Source, by_block, device_of, joined, neighbours
from fl_server.aggregation.shapes import AcceptedUpdates
from protos.codec import Entry, Layout

SumUpdates = Callable[[Sequence[Source], Layout, Sequence[Sequence[float]]], list[fl.Tensors]]
"""What `sum_updates` does, in this process or shared among several."""


def sum_payloads(
    updates: AcceptedUpdates, wanted: Mapping[str, fl.WeightedSum], sum_them: SumUpdates
) -> dict[str, fl.Tensors]:
    """The sums by name; each payload is read once for all the sums over it."""
    totals: dict[str, fl.Tensors] = {}
    for payload in {row.payload: None for row in wanted.values()}:
        names = [name for name, row in wanted.items() if row.payload == payload]
        rows = [wanted[name].coefficients for name in names]
        totals.update(zip(names, sum_them(updates.sources, updates.shape.layout_of(payload), rows), strict=True))
    return totals


def sum_updates(sources: Sequence[Source], layout: Layout, rows: Sequence[Sequence[float]]) -> list[fl.Tensors]:
    """For each row the weighted sum of the trainable tensors of the updates; in float32 for a lower precision.

    Args:
        sources: the updates, all of this layout, in the order of client id bytes.
        layout: of each update.
        rows: coefficients, one for each update.

    Raises:
        OSError, LayoutError: a file is gone or too short.
    """
    sums: list[fl.Tensors] = [{} for _ in rows]
    device = device_of(sources)
    for together in neighbours([entry for entry in layout.entries if entry.trainable]):
        wholes = by_block(sources, joined(together), lambda blocks: fl.weighted_sums(blocks, rows), device=device)
        for total, whole in zip(sums, wholes, strict=True):
            total.update(apart(whole, together))
    return sums


def apart(whole: torch.Tensor, entries: Sequence[Entry]) -> fl.Tensors:
    """The tensors of a group, each in memory of its own: the last bit of a norm may depend on the alignment."""
    if len(entries) == 1:
        return {entries[0].name: whole}
    pieces = whole.split([entry.numel for entry in entries])
    return {entry.name: piece.view(entry.shape).clone() for entry, piece in zip(entries, pieces, strict=True)}


def average_buffers(sources: Sequence[Source], layout: Layout, weights: Sequence[float]) -> fl.Tensors:
    """The buffers after a round: floating ones averaged plainly, integers at their maximum.

    Values that are the same in all updates keep their bits, also where they are not finite.
    """

    def mean(blocks: Iterator[torch.Tensor]) -> list[torch.Tensor]:
        return [mean_of_buffers(blocks, weights)]

    def largest(blocks: Iterator[torch.Tensor]) -> list[torch.Tensor]:
        return [fl.maximum(blocks)]

    averaged: fl.Tensors = {}
    device = device_of(sources)
    for entry in layout.entries:
        if not entry.trainable:
            reduce = mean if entry.dtype.is_floating_point else largest
            [averaged[entry.name]] = by_block(sources, entry, reduce, device=device)
    return averaged
