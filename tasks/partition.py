"""Who holds which examples: a data set dealt to clients by seed, and the splits that make federated learning hard.

Each function takes class labels (numbers, [M]), a number of clients N and a seed, and gives one index array for each
client; no example is given twice. The same arguments give the same split with the same NumPy: where devices differ in
that, or for good measure, make the split once and install it as a file (`tasks.partition_file`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tasks.base import Shard, Task, TaskError, task_code

Indices = npt.NDArray[np.int64]
Method = Literal["dirichlet", "iid", "shards"]

NEGLIGIBLE = 1e-12
"""Class probabilities up to this count as zero: waiting for such a draw would take for ever."""


@dataclass(frozen=True, slots=True)
class PartitionSpec:
    """How to deal a data set; two equal specs give the same split of the same labels."""

    method: Method
    clients: int
    """N, 1 or more."""
    seed: int = 0
    alpha: float = 0.3
    """Concentration of "dirichlet" over classes, over 0: 0.1 is very uneven, 100 nearly even. Others ignore it."""

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise TaskError(f'expected the partition method {", ".join(get_args(Method))}, got "{self.method}"')
        if self.clients < 1:
            raise TaskError(f"expected 1 or more clients, got {self.clients}")
        if self.seed < 0:
            raise TaskError(f"expected a partition seed of 0 or more, got {self.seed}")
        if not 0 < self.alpha < float("inf"):
            raise TaskError(f"expected alpha over 0, got {self.alpha}")


def training_labels(task: Task) -> Tensor:
    """Class numbers [M] of a task's whole training set, in the order that a shard's indices count in."""
    labels = getattr(task, "train_labels", None)
    with task_code("reading the task's training labels"):
        return cast(Tensor, labels()) if callable(labels) else task.train_data(Shard()).targets


def make_partition(spec: PartitionSpec, labels: Tensor) -> list[Tensor]:
    """The examples of each client, as sorted int64 index tensors, for class labels of shape [M].

    Raises TaskError when there are fewer examples than clients, and when labels are not class numbers.
    """
    if labels.ndim != 1 or labels.is_floating_point():
        raise TaskError(f"expected one class number for each example, got {labels.dtype} of shape {list(labels.shape)}")
    if len(labels) < spec.clients:
        raise TaskError(f"expected at least one example for each of {spec.clients} clients, got {len(labels)} in all")
    classes: Indices = np.unique(labels.cpu().numpy(), return_inverse=True)[1].astype(np.int64)
    split: dict[Method, Callable[[], list[Indices]]] = {
        "iid": lambda: iid(classes, spec.clients, spec.seed),
        "shards": lambda: shards(classes, spec.clients, spec.seed),
        "dirichlet": lambda: dirichlet_balanced(classes, spec.clients, spec.seed, spec.alpha),
    }
    return [torch.from_numpy(np.sort(part)) for part in split[spec.method]()]


def iid(labels: Indices, clients: int, seed: int) -> list[Indices]:
    """Shuffled and cut into pieces of equal size; the first M mod N clients have one example more."""
    return list(np.array_split(np.random.default_rng(seed).permutation(len(labels)), clients))


def shards(labels: Indices, clients: int, seed: int) -> list[Indices]:
    """Sorted by label, cut into 2 N equal shards, two random ones for each client (McMahan et al., AISTATS 2017).

    A client sees at most two classes where the shard length divides every class's size, else up to four.
    """
    pieces = np.array_split(np.argsort(labels, kind="stable"), 2 * clients)
    dealt = np.random.default_rng(seed).permutation(2 * clients).reshape(clients, 2)
    return [np.concatenate([pieces[first], pieces[second]]) for first, second in dealt]


def dirichlet_balanced(labels: Indices, clients: int, seed: int, alpha: float) -> list[Indices]:
    """Equal sizes floor(M / N), class proportions q_i ~ Dir(alpha * ones(C)) (Xu et al., FedCM, appendix C).

    Clients fill up together: one that is not full is picked uniformly, and takes the last unused example of a class
    drawn from its q_i over the classes that remain. When only classes remain that its q_i all but excludes, it draws by
    their remaining counts, for small alpha would wait for ever. Labels are 0 to C-1, each in use.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    pools = [order[labels[order] == label].tolist() for label in range(int(labels.max()) + 1)]
    q = rng.dirichlet(np.full(len(pools), alpha), size=clients)
    q[q <= NEGLIGIBLE] = 0
    size = len(labels) // clients
    held: list[list[int]] = [[] for _ in range(clients)]
    open_clients = list(range(clients))
    cumulative = np.cumsum(q, axis=1).tolist()
    for pick, draw in rng.random((size * clients, 2)).tolist():
        place = int(pick * len(open_clients))
        client = open_clients[place]
        pool = pools[_drawn_class(cumulative[client], pools, draw)]
        held[client].append(pool.pop())
        if not pool:
            q[:, [not pool for pool in pools]] = 0
            cumulative = np.cumsum(q, axis=1).tolist()
        if len(held[client]) == size:
            open_clients[place] = open_clients[-1]
            open_clients.pop()
    return [np.array(indices, dtype=np.int64) for indices in held]


def _drawn_class(cumulative: list[float], pools: list[list[int]], draw: float) -> int:
    """Inverse distribution function at draw in [0, 1), over the classes that still have mass."""
    if cumulative[-1] == 0:
        cumulative = np.cumsum([len(pool) for pool in pools]).tolist()
    # 1 - draw is over 0, so the first entry that reaches it always belongs to a class with mass.
    return bisect_left(cumulative, (1 - draw) * cumulative[-1])
