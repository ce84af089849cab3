"""The methods of partitioning: how the examples, by class or by group, are divided among clients.

Some cut one sequence of examples into pieces: shuffled, sorted by class, or grouped by origin. One divides each class
among the clients, so that their sizes differ too. In the others each client has a mixture q_i over classes and draws
its examples from it. Labels are 0 to C-1, and each occurs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from fl_tasks.errors import TaskError
from fl_tasks.partitioning.spec import PartitionSpec

Indices = npt.NDArray[np.int64]


def client_sizes(spec: PartitionSpec, total: int, rng: np.random.Generator) -> Indices:
    """Sizes [N]: floor(total / N) each; with sigma, unequal ones with this total, at least 1 each."""
    return lognormal_sizes(spec, total, rng) if spec.sigma else np.full(spec.clients, total // spec.clients)


def lognormal_sizes(spec: PartitionSpec, total: int, rng: np.random.Generator) -> Indices:
    """Sizes [N] in the ratios of lognormal(ln(total / N), sigma) draws, with this total (Acar et al., FedDyn).

    The largest remainders are rounded up, and every client has at least 1 example.
    """
    exponents = spec.sigma * rng.standard_normal(spec.clients)
    # Only ratios matter after rescaling. Relative to the largest exponent nothing overflows.
    ratios = np.exp(exponents - exponents.max())
    exact = ratios / ratios.sum() * total
    sizes: Indices = np.maximum(np.floor(exact), 1).astype(np.int64)
    missing = total - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[: max(missing, 0)]] += 1
    for _ in range(-missing):
        sizes[sizes.argmax()] -= 1
    return sizes


def iid(labels: Indices, spec: PartitionSpec, rng: np.random.Generator) -> list[Indices]:
    """Shuffled and cut into pieces of equal size; the first M mod N clients have one example more.

    Stratified (FedDyn's CIFAR-100): sorted by class after the shuffle, then assigned to the clients in turn.
    """
    order = rng.permutation(len(labels))
    if spec.stratified:
        order = order[np.argsort(labels[order], kind="stable")]
        return [order[client :: spec.clients] for client in range(spec.clients)]
    if spec.sigma:
        return np.split(order, np.cumsum(client_sizes(spec, len(labels), rng))[:-1])
    return list(np.array_split(order, spec.clients))


def shards(labels: Indices, spec: PartitionSpec, rng: np.random.Generator) -> list[Indices]:
    """Sorted by label, cut into 2 N equal shards, two random ones for each client (McMahan et al., AISTATS 2017).

    A client has at most two classes if the shard length divides every class's size, else up to four. With sigma, a
    client's two shards are each half of its size.
    """
    ordered = np.argsort(labels, kind="stable")
    chosen = rng.permutation(2 * spec.clients).reshape(spec.clients, 2)
    pieces = np.array_split(ordered, 2 * spec.clients)
    if spec.sigma:
        sizes = client_sizes(spec, len(labels), rng)
        lengths = np.empty(2 * spec.clients, dtype=np.int64)
        lengths[chosen] = np.stack([sizes // 2, sizes - sizes // 2], axis=1)
        pieces = np.split(ordered, np.cumsum(lengths)[:-1])
    return [np.concatenate([pieces[first], pieces[second]]) for first, second in chosen]


def natural(groups: Indices, spec: PartitionSpec, rng: np.random.Generator) -> list[Indices]:
    """Whole groups (LEAF's writers and persons). With 0 clients, or as many as groups, client i has the i-th group.

    Fewer clients get random groups, floor(G / N) or one more each. Raises TaskError for more clients than groups.
    """
    count = int(groups.max()) + 1
    if count < spec.clients:
        raise TaskError(f"expected at least one group for each of {spec.clients} clients, got {count} groups")
    clients = spec.clients or count
    order = np.arange(count) if count == clients else rng.permutation(count)
    owner = np.empty(count, dtype=np.int64)
    owner[order] = np.arange(count) % clients
    holders = owner[groups]
    sizes = np.bincount(holders, minlength=clients)
    return np.split(np.argsort(holders, kind="stable"), np.cumsum(sizes)[:-1])


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
    """A client takes in each turn the last unused example of a class drawn from its q over the remaining classes.

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
