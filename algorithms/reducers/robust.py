"""Robust aggregation: coordinate-wise median and trimmed mean, and multi-Krum's selection of updates.

A method defines sums S = sum_i c_i d_i of its clients' payloads d_i. With its weights p_i, which sum to one,

    S = sum_i p_i v_i,      v_i = (c_i / p_i) d_i

is the weighted mean of contributions v_i, which all have the units of S. For Dbar, c_i = p_i k_i with clip factor k_i,
so v_i = k_i d_i is the delta as admitted. For FedCM's G, c_i = - p_i k_i / (eta_l K_i), so v_i is client i's estimate
of the gradient with its own K_i. Median and trimmed mean replace the weighted mean of the v_i entry by entry. If all
v_i equal v, the mean is v sum_i p_i = v and so are median and trimmed mean, up to rounding.

Median and trimmed mean do not weigh clients. A client reports n_i itself, and p_i cancels out of v_i where c_i contains
it.

Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018
(median, trimmed mean). Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries: Byzantine Tolerant
Gradient Descent, NeurIPS 2017 (Krum, multi-Krum).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch


def contribution_scales(coefficients: Sequence[float], weights: Sequence[float]) -> tuple[float, ...]:
    """c_i / p_i: the factors that turn d_i into the contributions v_i, whose weighted mean is the sum."""
    return tuple(c_i / p_i for c_i, p_i in zip(coefficients, weights, strict=True))


def median_cut(count: int) -> int:
    """Values to drop on each side so that one or two remain in the middle."""
    return (count - 1) // 2


def trimmed_cut(count: int, trim: float) -> int:
    """Values to drop on each side: the share `trim`, rounded up, at most as many as for the median."""
    # 0.07 * 100 is 7.000000000000001 in floating point and must count as 7.
    return min(math.ceil(round(trim * count, 9)), median_cut(count))


def stacked(blocks: Iterable[torch.Tensor]) -> torch.Tensor:
    """The same slice of each update, as the rows of a float64 matrix [clients, entries]."""
    if isinstance(blocks, torch.Tensor):
        return blocks.flatten(1).double()
    return torch.stack([block.flatten().double() for block in blocks])


def trimmed_mean(values: torch.Tensor, cut: int) -> torch.Tensor:
    """The mean of each column without its `cut` smallest and `cut` largest values.

    Args:
        values: [clients, entries], float64.
        cut: 0 gives the mean, `median_cut` the median (of an even number: the mean of the middle two).

    Raises:
        ValueError: no value would remain.
    """
    if not 0 <= 2 * cut < len(values):
        raise ValueError(f"expected to drop fewer than all {len(values)} values, got {cut} on each side")
    kept = values.sort(dim=0).values[cut : len(values) - cut]
    # Row by row: torch may sum along a dimension in another order at the end of a block.
    total = torch.zeros_like(kept[0])
    for row in kept:
        total.add_(row)
    return total / len(kept)


def trimmed_maximum(values: torch.Tensor, cut: int) -> torch.Tensor:
    """The largest value of each column without its `cut` largest ones. For counters, of which a mean takes the maximum.

    Args:
        values: [clients, entries], of any dtype.
        cut: as in `trimmed_mean`; 0 is the maximum.

    Raises:
        ValueError: no value would remain.
    """
    if not 0 <= 2 * cut < len(values):
        raise ValueError(f"expected to drop fewer than all {len(values)} values, got {cut} on each side")
    return values.sort(dim=0).values[len(values) - 1 - cut]


def squared_distances(values: torch.Tensor) -> torch.Tensor:
    """|v_i - v_j|^2 of all pairs of rows, [clients, clients]; exactly 0 for equal rows."""
    distances = values.new_zeros(len(values), len(values))
    for i, row in enumerate(values):
        distances[i, i + 1 :] = (values[i + 1 :] - row).square_().sum(dim=1)
    return distances + distances.T


def multi_krum(distances: torch.Tensor, byzantine: int, keep: int = 0) -> tuple[int, ...]:
    """The indices of the `keep` updates with the smallest scores, in rising order.

    The score of an update is the sum of its squared distances to its n - f - 2 nearest others. Ties go to the smaller
    index. Callers pass updates in the order of client id bytes.

    Args:
        distances: squared, [n, n], symmetric.
        byzantine: f, the assumed number of bad updates.
        keep: m, from 1 to n - f; 0 stands for n - f - 2.

    Raises:
        ValueError: too few updates for f or for `keep`.
    """
    count = len(distances)
    neighbours = count - byzantine - 2
    keep = keep or neighbours
    if neighbours < 1 or not 1 <= keep <= count - byzantine:
        raise ValueError(
            f"expected {byzantine + 3} updates or more and at most {count - byzantine} to keep, got {count} and {keep}"
        )
    # The nearest to each update is itself, at distance 0.
    scores = [math.fsum(sorted(row)[1 : neighbours + 1]) for row in distances.tolist()]
    return tuple(sorted(sorted(range(count), key=lambda index: (scores[index], index))[:keep]))
