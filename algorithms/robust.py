"""Means that a few bad updates cannot move far: coordinate median, trimmed mean, and multi-Krum's choice of updates.

A method wants sums S = sum_i c_i d_i over what its clients sent (d_i). Written with its weights p_i, which sum to one,

    S = sum_i p_i v_i,      v_i = (c_i / p_i) d_i

is the weighted mean of contributions v_i that are all in the units of S: for Dbar c_i = p_i k_i, so v_i = k_i d_i is
the delta as admitted (clip factor k_i); for FedCM's G c_i = - p_i k_i / (eta_l K_i), so v_i is client i's own estimate
of the gradient, by its own K_i. Median and trimmed mean put their centre of the v_i in the place of that mean, entry
by entry. Where all v_i are equal the mean is v sum_i p_i = v and every centre is v: they agree to rounding.

The centres weigh no client: n_i is what a client says of itself, and p_i cancels out of v_i wherever c_i contains it.

Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018
(median, trimmed mean). Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries: Byzantine Tolerant
Gradient Descent, NeurIPS 2017 (Krum, multi-Krum).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch


def contribution_scales(coefficients: Sequence[float], weights: Sequence[float]) -> tuple[float, ...]:
    """c_i / p_i: what turns d_i into the contribution v_i whose weighted mean the sum is."""
    return tuple(c_i / p_i for c_i, p_i in zip(coefficients, weights, strict=True))


def median_cut(count: int) -> int:
    """Values to leave out on each side so that the middle one remains, or the middle two."""
    return (count - 1) // 2


def trimmed_cut(count: int, trim: float) -> int:
    """Values to leave out on each side: `trim` of them, rounded up, and no more than the median does."""
    # 0.07 * 100 is 7.000000000000001 in floating point, and means 7.
    return min(math.ceil(round(trim * count, 9)), median_cut(count))


def stacked(blocks: Iterable[torch.Tensor]) -> torch.Tensor:
    """The same slice of each update as rows of one float64 matrix, [clients, entries]."""
    return torch.stack([block.flatten().double() for block in blocks])


def trimmed_mean(values: torch.Tensor, cut: int) -> torch.Tensor:
    """The mean of each column without its `cut` smallest and `cut` largest values.

    Args:
        values: [clients, entries], float64.
        cut: 0 is the mean; `median_cut` the median, which of an even number is the mean of the middle two.

    Raises:
        ValueError: nothing would be left.
    """
    if not 0 <= 2 * cut < len(values):
        raise ValueError(f"expected to leave out fewer than all {len(values)} values, got {cut} on each side")
    kept = values.sort(dim=0).values[cut : len(values) - cut]
    # Row by row: what torch adds up along a dimension it may add in another order at the end of a block.
    total = torch.zeros_like(kept[0])
    for row in kept:
        total.add_(row)
    return total / len(kept)


def trimmed_maximum(values: torch.Tensor, cut: int) -> torch.Tensor:
    """The largest of each column without its `cut` largest values: counters, of which a mean takes the largest.

    Args:
        values: [clients, entries], of any dtype.
        cut: as in `trimmed_mean`; 0 is the maximum.

    Raises:
        ValueError: nothing would be left.
    """
    if not 0 <= 2 * cut < len(values):
        raise ValueError(f"expected to leave out fewer than all {len(values)} values, got {cut} on each side")
    return values.sort(dim=0).values[len(values) - 1 - cut]


def squared_distances(values: torch.Tensor) -> torch.Tensor:
    """|v_i - v_j|^2 of all pairs of rows, [clients, clients]; of equal rows exactly 0."""
    distances = values.new_zeros(len(values), len(values))
    for i, row in enumerate(values):
        distances[i, i + 1 :] = (values[i + 1 :] - row).square_().sum(dim=1)
    return distances + distances.T


def multi_krum(distances: torch.Tensor, byzantine: int, keep: int = 0) -> tuple[int, ...]:
    """The `keep` updates that have the smallest scores, in rising order of index.

    The score of an update is the sum of its squared distances to its n - f - 2 nearest others. Of equal scores the
    smaller index counts as the smaller: callers give updates in the order of client id bytes.

    Args:
        distances: squared, [n, n], symmetric.
        byzantine: f, the bad updates that there may be.
        keep: m, 1 to n - f; 0 is n - f - 2.

    Raises:
        ValueError: too few updates for f, or for what is to be kept.
    """
    count = len(distances)
    neighbours = count - byzantine - 2
    keep = keep or neighbours
    if neighbours < 1 or not 1 <= keep <= count - byzantine:
        raise ValueError(
            f"expected {byzantine + 3} updates or more and at most {count - byzantine} to keep, got {count} and {keep}"
        )
    # The nearest of each row is itself, at 0.
    scores = [math.fsum(sorted(row)[1 : neighbours + 1]) for row in distances.tolist()]
    return tuple(sorted(sorted(range(count), key=lambda index: (scores[index], index))[:keep]))
