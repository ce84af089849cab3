"""The method that divides each class among the clients, so that their sizes differ too."""

from __future__ import annotations

import numpy as np

from fl_tasks.errors import TaskError
from fl_tasks.partitioning.sizes import Indices
from fl_tasks.partitioning.spec import PartitionSpec

ATTEMPTS = 1000
"""Draws before the search for one with enough examples for every client ends."""


def dirichlet_class(labels: Indices, spec: PartitionSpec, rng: np.random.Generator) -> list[Indices]:
    """Each class shuffled and cut among clients in the ratios of Dir(alpha * ones(N)) (FedEM, Marfoq et al., 2021).

    Repeated until every client has `min_examples`. Raises TaskError if that is impossible or too unlikely.
    """
    cuts = _cuts(np.bincount(labels), spec, rng)
    order = rng.permutation(len(labels))
    pieces = [np.split(order[labels[order] == label], cut) for label, cut in enumerate(cuts)]
    return [np.concatenate(part) for part in zip(*pieces, strict=True)]


def _cuts(counts: Indices, spec: PartitionSpec, rng: np.random.Generator) -> Indices:
    """Where to cut each class, [C, N - 1]."""
    if counts.sum() < spec.clients * spec.min_examples:
        raise _too_few(counts, spec, "there are not enough of them")
    for _ in range(ATTEMPTS):
        shares = rng.dirichlet(np.full(spec.clients, spec.alpha), size=len(counts))
        cuts = (np.cumsum(shares, axis=1)[:, :-1] * counts[:, None]).astype(np.int64)
        sizes = np.diff(cuts, prepend=0, append=counts[:, None]).sum(axis=0)
        if sizes.min() >= spec.min_examples:
            return cuts
    raise _too_few(counts, spec, f"none of {ATTEMPTS} draws achieved it")


def _too_few(counts: Indices, spec: PartitionSpec, why: str) -> TaskError:
    return TaskError(
        f"expected {spec.min_examples} or more of {counts.sum()} examples for each of {spec.clients} clients at alpha ="
        f" {spec.alpha}, but {why}: raise alpha, or lower min_examples or the number of clients"
    )
