"""Splits that cut one line of examples into pieces: shuffled, sorted by class, or by whom the examples come from."""

from __future__ import annotations

import numpy as np

from tasks.base import TaskError
from tasks.partition_spec import PartitionSpec
from tasks.splits.sizes import Indices, client_sizes


def iid(labels: Indices, spec: PartitionSpec, rng: np.random.Generator) -> list[Indices]:
    """Shuffled and cut into pieces of equal size; the first M mod N clients have one example more.

    Stratified (FedDyn's CIFAR-100): sorted by class after the shuffle and dealt round, one example to each client.
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

    A client sees at most two classes where the shard length divides every class's size, else up to four. With sigma a
    client's two shards are the halves of its size, wherever on the line they come to lie.
    """
    line = np.argsort(labels, kind="stable")
    dealt = rng.permutation(2 * spec.clients).reshape(spec.clients, 2)
    pieces = np.array_split(line, 2 * spec.clients)
    if spec.sigma:
        sizes = client_sizes(spec, len(labels), rng)
        lengths = np.empty(2 * spec.clients, dtype=np.int64)
        lengths[dealt] = np.stack([sizes // 2, sizes - sizes // 2], axis=1)
        pieces = np.split(line, np.cumsum(lengths)[:-1])
    return [np.concatenate([pieces[first], pieces[second]]) for first, second in dealt]


def natural(groups: Indices, spec: PartitionSpec, rng: np.random.Generator) -> list[Indices]:
    """Whole groups (LEAF's writers and persons): with as many clients as groups, client i holds the i-th group.

    Fewer clients share the groups out at random, floor(G / N) or one more each. Raises TaskError for more clients.
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
