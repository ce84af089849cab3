"""Methods that cut one sequence of examples into pieces: shuffled, sorted by class, or grouped by origin."""

from __future__ import annotations

import numpy as np

from fl_tasks.errors import TaskError
from fl_tasks.partitioning.sizes import Indices, client_sizes
from fl_tasks.partitioning.spec import PartitionSpec


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
    """Whole groups (LEAF's writers and persons). With as many clients as groups, client i has the i-th group.

    Fewer clients get random groups, floor(G / N) or one more each. Raises TaskError for more clients than groups.
    """
    count = int(groups.max()) + 1
    if count < spec.clients:
        raise TaskError(f"expected at least one group for each of {spec.clients} clients, got {count} groups")
    order = np.arange(count) if count == spec.clients else rng.permutation(count)
    owner = np.empty(count, dtype=np.int64)
    owner[order] = np.arange(count) % spec.clients
    holders = owner[groups]
    sizes = np.bincount(holders, minlength=spec.clients)
    return np.split(np.argsort(holders, kind="stable"), np.cumsum(sizes)[:-1])
