"""Reducers that are not a mean, from the spool: block by block over all updates at once, never whole updates.

Memory is a block times the cohort for median and trimmed mean, and the distances of all pairs beside it for multi-Krum.
Every entry of a centre is computed by itself, so cutting into blocks changes no bit of it. How they fit into what a
method asks for is derived in `algorithms.robust`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import algorithms as fl
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
from fl_server.errors import InvalidInput
from fl_server.reduce import average_buffers, by_block, sum_payloads
from fl_server.run_config import RoundSection
from fl_server.shapes import UpdateShape
from protos.codec import Layout

BLOCK_ENTRIES = 1 << 13
"""Of one update in a block. Distances are summed block by block, so this number is part of their last bits."""

Blocks = Iterator[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Collected:
    """The accepted updates of an exchange, in the order of client id bytes."""

    cohort: Sequence[fl.UpdateInfo]
    paths: Sequence[Path]
    shape: UpdateShape


def refuse_unfit(section: RoundSection, algorithm: fl.Algorithm) -> None:
    """Raises InvalidInput for a method that the reducer would break, or that would break the reducer."""
    reducer = section.reducer
    if reducer != "mean" and (why := _unfit(reducer, algorithm)):
        raise InvalidInput("round.reducer", f'"mean" with {algorithm.name}: {why}', reducer)


def _unfit(reducer: str, algorithm: fl.Algorithm) -> str:
    """Why a method does not go with a reducer that is not a mean; empty if it does."""
    if algorithm.needs_population or algorithm.keeps_client_state:
        return "what its clients keep must add up to what the server keeps, and only a mean of all updates does that"
    if "fednova" in (algorithm.name, algorithm.parameters.get("normaliser")):
        return "its step is as long as the steps that clients say they made, so one of them could say any length"
    sent = [payload for exchange in algorithm.exchanges for payload in exchange.payloads]
    if reducer == "krum" and sent != ["delta"]:
        return "updates are chosen by their deltas, and its clients send more, which nothing would look at"
    return ""


def chosen(section: RoundSection, collected: Collected) -> Collected:
    """The updates that are to be reduced: multi-Krum's choice, by the deltas as admitted; else all."""
    if section.reducer != "krum":
        return collected
    factors = torch.tensor([[info.clip_factor] for info in collected.cohort], dtype=torch.float64)
    distances = torch.zeros(len(factors), len(factors), dtype=torch.float64)

    def measure(blocks: Blocks) -> list[torch.Tensor]:
        distances.add_(squared_distances(stacked(blocks) * factors))
        return []

    for entry in collected.shape.layout_of("delta").entries:
        if entry.trainable:
            by_block(collected.paths, entry, measure, BLOCK_ENTRIES)
    kept = multi_krum(distances, section.krum_byzantine, section.krum_keep)
    return Collected([collected.cohort[i] for i in kept], [collected.paths[i] for i in kept], collected.shape)


def reduce_payloads(
    section: RoundSection, collected: Collected, wanted: Mapping[str, fl.WeightedSum], weights: Sequence[float]
) -> dict[str, fl.Tensors]:
    """What the method asks for, by name, with the run's reducer in the place of the mean. weights: the method's p_i."""
    if section.reducer in ("mean", "krum"):
        return sum_payloads(collected.paths, collected.shape, wanted)
    cut = _cut(section, len(collected.paths))
    centres: dict[str, fl.Tensors] = {}
    for payload in {row.payload: None for row in wanted.values()}:
        scales = {
            name: contribution_scales(row.coefficients, weights)
            for name, row in wanted.items()
            if row.payload == payload
        }
        layout = collected.shape.layout_of(payload)
        centres |= zip(scales, centre_updates(collected.paths, layout, list(scales.values()), cut), strict=True)
    return {name: centres[name] for name in wanted}


def reduce_buffers(section: RoundSection, collected: Collected, weights: Sequence[float]) -> fl.Tensors:
    """The model's buffers after a round, with the run's reducer in the place of the mean and of the maximum.

    Multi-Krum chooses by deltas, and an update that it takes may lie in its buffers: theirs is the median of all.
    """
    deltas = collected.shape.layout_of("delta")
    if section.reducer == "mean":
        return average_buffers(collected.paths, deltas, weights)
    cut = _cut(section, len(collected.paths))

    def centre(blocks: Blocks) -> list[torch.Tensor]:
        alike = list(blocks)
        if alike[0].is_floating_point():
            return [trimmed_mean(stacked(alike), cut).to(alike[0].dtype)]
        return [trimmed_maximum(torch.stack(alike), cut)]

    centres: fl.Tensors = {}
    for entry in deltas.entries:
        if not entry.trainable:
            [centres[entry.name]] = by_block(collected.paths, entry, centre, BLOCK_ENTRIES)
    return centres


def _cut(section: RoundSection, count: int) -> int:
    """Values that a centre of `count` updates leaves out on each side."""
    return trimmed_cut(count, section.trim) if section.reducer == "trimmed_mean" else median_cut(count)


def centre_updates(
    paths: Sequence[Path], layout: Layout, scales: Sequence[Sequence[float]], cut: int
) -> list[fl.Tensors]:
    """For each row of scales the trimmed mean of the scaled updates' trainable tensors, rounded once.

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
            return [trimmed_mean(values * factor, cut).to(dtype) for factor in factors]

        for result, whole in zip(centres, by_block(paths, entry, centre, BLOCK_ENTRIES), strict=True):
            result[entry.name] = whole
    return centres
