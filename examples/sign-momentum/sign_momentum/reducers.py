"""Two reducers: the weighted median of every entry, and the mean of the updates that are most similar to the others."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

import algorithms as fl

__version__ = "1"

Blend = Annotated[float, fl.Range(at_least=0, at_most=1)]


def weighted_median(blend: Blend = 0.0) -> fl.Reducer:
    """The least value v with sum of p_i over v_i <= v at least a half. blend: the share of the mean in the result."""

    def reduce(values: Tensor, weights: Tensor) -> Tensor:
        ordered, which = values.sort(dim=0, stable=True)
        # The share of the clients up to each one. Rounding must not hide that it reaches a half.
        share = weights[which].cumsum(dim=0) + 1e-12
        first = (share >= 0.5).int().argmax(dim=0, keepdim=True)
        median = ordered.gather(0, first).squeeze(0)
        if blend == 0.0:
            return median
        mean = torch.zeros_like(median)
        for p_i, row in zip(weights, values, strict=True):  # one after the other: the same bits in blocks of any size
            mean += p_i * row
        return (1.0 - blend) * median + blend * mean

    return fl.Reducer(reduce=reduce, fewest=3)


def most_similar(keep: fl.Share = 0.5) -> fl.Reducer:
    """The updates whose deltas have the largest mean cosine to the others. keep: their share, rounded up."""

    def select(geometry: fl.Geometry, weights: Tensor) -> list[int]:
        count = len(weights)
        score = (geometry.cosines.sum(dim=1) - geometry.cosines.diagonal()) / max(1, count - 1)
        # Rounded, so that equal updates have equal scores; then the order of the clients' ids decides.
        ranked = sorted(range(count), key=lambda index: (-round(float(score[index]), 9), index))
        return ranked[: max(1, -(-round(keep * count * 1e9) // 10**9))]

    return fl.Reducer(select=select, fewest=3)
