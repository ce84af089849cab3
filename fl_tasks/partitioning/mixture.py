"""Methods with class proportions: each client has a mixture q_i over classes and draws its examples from it.

Labels are 0 to C-1, and each occurs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from fl_tasks.errors import TaskError
from fl_tasks.partitioning.sizes import Indices, client_sizes
from fl_tasks.partitioning.spec import PartitionSpec

Mixtures = npt.NDArray[np.float64]

NEGLIGIBLE = 1e-12
"""Class probabilities up to this value count as zero, because such a draw would practically never occur."""


def dirichlet_balanced(labels: Indices, spec: PartitionSpec, rng: np.random.Generator) -> list[Indices]:
    """Class proportions q_i ~ Dir(alpha * ones(C)), clients filled in random order (Xu et al., FedCM, appendix C).

    In each step, one of the clients that are not full is chosen uniformly. It takes an example of a class drawn from
    its q_i.
    """
    sizes, pools = client_sizes(spec, len(labels), rng), _pools(labels, rng)
    return _fill_together(pools, _dirichlet(labels, spec, rng), sizes, rng)


def few_classes(labels: Indices, spec: PartitionSpec, rng: np.random.Generator) -> list[Indices]:
    """Each client draws c different classes, all equally likely, and is filled as in `dirichlet_balanced`.

    Clients may draw the same class. A client whose classes are exhausted gets examples of the remaining classes and
    then has more than c. Raises TaskError if the data has fewer classes than c.
    """
    count = int(labels.max()) + 1
    if count < spec.classes:
        raise TaskError(f"expected up to {count} classes for each client, as the data has, got {spec.classes}")
    sizes, pools = client_sizes(spec, len(labels), rng), _pools(labels, rng)
    ranks = rng.random((spec.clients, count)).argsort(axis=1)
    return _fill_together(pools, (ranks < spec.classes) / spec.classes, sizes, rng)


def dirichlet_hsu(labels: Indices, spec: PartitionSpec, rng: np.random.Generator) -> list[Indices]:
    """The mixtures of `dirichlet_balanced`, with one client filled after another (Hsu et al., 2019, Google's programs).

    So later clients get the remaining examples. With rotate, clients take one example each in turn.
    """
    sizes, pools = client_sizes(spec, len(labels), rng), _pools(labels, rng)
    q = _dirichlet(labels, spec, rng)
    turns = _in_rotation(sizes) if spec.rotate else np.repeat(np.arange(spec.clients), sizes).tolist()
    return _fill(pools, q, zip(turns, rng.random(len(turns)).tolist(), strict=True))


def _pools(labels: Indices, rng: np.random.Generator) -> list[list[int]]:
    order = rng.permutation(len(labels))
    return [order[labels[order] == label].tolist() for label in range(int(labels.max()) + 1)]


def _dirichlet(labels: Indices, spec: PartitionSpec, rng: np.random.Generator) -> Mixtures:
    counts = np.bincount(labels)
    concentration = spec.alpha * (counts / len(labels) if spec.prior_scaled else np.ones(len(counts)))
    return rng.dirichlet(concentration, size=spec.clients)


def _fill_together(pools: list[list[int]], q: Mixtures, sizes: Indices, rng: np.random.Generator) -> list[Indices]:
    picks, draws = rng.random((int(sizes.sum()), 2)).T.tolist()
    return _fill(pools, q, zip(_random_turns(sizes, picks), draws, strict=True))


def _random_turns(sizes: Indices, picks: Iterable[float]) -> Iterator[int]:
    """Clients chosen uniformly among those that are not full. picks: one number in [0, 1) for each turn."""
    left = sizes.tolist()
    waiting = list(range(len(left)))
    for pick in picks:
        place = int(pick * len(waiting))
        client = waiting[place]
        left[client] -= 1
        if not left[client]:
            waiting[place] = waiting[-1]
            waiting.pop()
        yield client


def _in_rotation(sizes: Indices) -> list[int]:
    return [int(client) for turn in range(int(sizes.max())) for client in np.flatnonzero(sizes > turn)]


def _fill(pools: list[list[int]], q: Mixtures, turns: Iterable[tuple[int, float]]) -> list[Indices]:
    """In each turn, a client takes the last unused example of a class drawn from its q over the remaining classes.

    If q is negligible for all remaining classes, the client draws by their remaining counts. Otherwise the draw would
    practically never end for small alpha.
    """
    q = np.where(q > NEGLIGIBLE, q, 0)
    cumulative = np.cumsum(q, axis=1).tolist()
    held: list[list[int]] = [[] for _ in q]
    for client, draw in turns:
        pool = pools[_drawn_class(cumulative[client], pools, draw)]
        held[client].append(pool.pop())
        if not pool:
            q[:, [not pool for pool in pools]] = 0
            cumulative = np.cumsum(q, axis=1).tolist()
    return [np.array(indices, dtype=np.int64) for indices in held]


def _drawn_class(cumulative: list[float], pools: list[list[int]], draw: float) -> int:
    """Inverse distribution function at draw in [0, 1), over the classes with positive mass."""
    if cumulative[-1] == 0:
        cumulative = np.cumsum([len(pool) for pool in pools]).tolist()
    # 1 - draw is positive, so the first entry that reaches it belongs to a class with positive mass.
    return bisect_left(cumulative, (1 - draw) * cumulative[-1])
