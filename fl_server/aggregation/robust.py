"""Robust reducers over the spool: median, trimmed mean and multi-Krum, block by block over all updates at once.

Memory is one block times the cohort for median and trimmed mean; multi-Krum adds the distances of all pairs. Every
entry of a centre is computed by itself, so cutting tensors into blocks changes no bit of it. `algorithms.robust`
derives how these reducers fit into the sums of a method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

import algorithms as fl
from algorithms.precision import master_dtype
from algorithms.robust import (
    contribution_scales,
    median_cut,
    multi_krum,
    squared_distances,
    stacked,
    trimmed_cut,
    trimmed_maximum,
    trimmed_mean,
)
from fl_server.aggregation.blocks import by_block
from fl_server.aggregation.shapes import AcceptedUpdates
from fl_server.run_config import RoundSection
from protos.codec import Layout

BLOCK_ENTRIES = 1 << 13
"""Entries of one update in a block. Distances are summed block by block, so their last bits depend on this number."""

Blocks = Iterator[torch.Tensor]


def conflict(reducer: str, algorithm: fl.Algorithm) -> str:
    """Why the method does not work with this robust reducer; empty if it does."""
    if algorithm.needs_population or algorithm.keeps_client_state:
        return "the states of its clients must add up to the server's state, which needs a mean of all updates"
    if "fednova" in (algorithm.name, algorithm.parameters.get("normaliser")):
        return "its step is as long as the step counts that clients report, so one client could report any length"
    sent = [payload for exchange in algorithm.exchanges for payload in exchange.payloads]
    if reducer == "krum" and sent != ["delta"]:
        return "updates are selected by their deltas, and its clients send other payloads, which nothing would check"
    return ""


def select_by_krum(section: RoundSection, updates: AcceptedUpdates) -> tuple[int, ...]:
    """Positions of the updates that multi-Krum keeps, by their clipped deltas."""
    factors = torch.tensor([[info.clip_factor] for info in updates.cohort], dtype=torch.float64)
    distances = torch.zeros(len(factors), len(factors), dtype=torch.float64)

    def measure(blocks: Blocks) -> list[torch.Tensor]:
        distances.add_(squared_distances(stacked(blocks) * factors))
        return []

    for entry in updates.shape.layout_of("delta").entries:
        if entry.trainable:
            by_block(updates.paths, entry, measure, BLOCK_ENTRIES)
    return multi_krum(distances, section.krum_byzantine, section.krum_keep)


def centre_payloads(
    section: RoundSection, updates: AcceptedUpdates, sums: Mapping[str, fl.WeightedSum], weights: Sequence[float]
) -> dict[str, fl.Tensors]:
    """The centre in place of each weighted sum, by name. weights: the method's weights p_i of the updates."""
    cut = _cut(section, len(updates.paths))
    centres: dict[str, fl.Tensors] = {}
    for payload in {row.payload: None for row in sums.values()}:
        scales = {
            name: contribution_scales(row.coefficients, weights) for name, row in sums.items() if row.payload == payload
        }
        layout = updates.shape.layout_of(payload)
        centres |= zip(scales, centre_updates(updates.paths, layout, list(scales.values()), cut), strict=True)
    return {name: centres[name] for name in sums}


def centre_buffers(section: RoundSection, updates: AcceptedUpdates) -> fl.Tensors:
    """The centre of the buffers, in place of their mean or maximum.

    Multi-Krum selects by deltas, and a selected update may still lie in its buffers: their median over all is used.
    """
    cut = _cut(section, len(updates.paths))

    def centre(blocks: Blocks) -> list[torch.Tensor]:
        alike = list(blocks)
        if alike[0].is_floating_point():
            return [trimmed_mean(stacked(alike), cut).to(alike[0].dtype)]
        return [trimmed_maximum(torch.stack(alike), cut)]

    centres: fl.Tensors = {}
    for entry in updates.shape.layout_of("delta").entries:
        if not entry.trainable:
            [centres[entry.name]] = by_block(updates.paths, entry, centre, BLOCK_ENTRIES)
    return centres


def _cut(section: RoundSection, count: int) -> int:
    """Values that a centre of `count` updates leaves out on each side."""
    return trimmed_cut(count, section.trim) if section.reducer == "trimmed_mean" else median_cut(count)


def centre_updates(
    paths: Sequence[Path], layout: Layout, scales: Sequence[Sequence[float]], cut: int
) -> list[fl.Tensors]:
    """For each row of scales the trimmed mean of the scaled updates' trainable tensors, rounded once, as a mean is.

    Args:
        paths: one file an update, all of this layout.
        layout: of each file.
        scales: rows of one factor for each path.
        cut: values of each entry that are left out on each side.

    Raises:
        OSError, LayoutError: a file is gone or too short.
    """
    factors = [torch.tensor(row, dtype=torch.float64).unsqueeze(1) for row in scales]
    centres: list[fl.Tensors] = [{} for _ in scales]
    for entry in layout.entries:
        if not entry.trainable:
            continue

        def centre(blocks: Blocks, dtype: torch.dtype = entry.dtype) -> list[torch.Tensor]:
            values = stacked(blocks)
            return [trimmed_mean(values * factor, cut).to(master_dtype(dtype)) for factor in factors]

        for result, whole in zip(centres, by_block(paths, entry, centre, BLOCK_ENTRIES), strict=True):
            result[entry.name] = whole
    return centres
