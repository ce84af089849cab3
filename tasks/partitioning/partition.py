"""Partitions a data set among clients by a seed, with the methods of the federated learning papers.

No example is assigned twice. The same spec and labels give the same partition with the same version of NumPy. If the
devices' versions differ, make the partition once and install it as a file (`tasks.partitioning.file`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from torch import Tensor

from tasks.base import Shard, Task, TaskError, task_code
from tasks.partitioning.by_class import dirichlet_class
from tasks.partitioning.contiguous import iid, natural, shards
from tasks.partitioning.mixture import dirichlet_balanced, dirichlet_hsu, few_classes
from tasks.partitioning.sizes import Indices
from tasks.partitioning.spec import Method, PartitionSpec

__all__ = ["Method", "PartitionSpec", "make_partition", "training_groups", "training_labels"]

Split = Callable[[Indices, PartitionSpec, np.random.Generator], list[Indices]]
"""(numbers [M] from 0 to C-1, all of which occur; spec; generator) -> the indices of each client."""

SPLITS: Mapping[Method, Split] = MappingProxyType(
    {
        "dirichlet": dirichlet_balanced,
        "dirichlet-hsu": dirichlet_hsu,
        "dirichlet-class": dirichlet_class,
        "classes": few_classes,
        "shards": shards,
        "iid": iid,
        "natural": natural,
    }
)


def training_labels(task: Task) -> Tensor:
    """Class numbers [M] of a task's whole training set, in the order of a shard's indices."""
    labels = getattr(task, "train_labels", None)
    with task_code("reading the task's training labels"):
        return cast(Tensor, labels()) if callable(labels) else task.train_data(Shard()).targets


def training_groups(task: Task) -> Tensor | None:
    """Group numbers [M], in the same order; None for a task without `train_groups`."""
    groups = getattr(task, "train_groups", None)
    with task_code("reading the groups of the task's training examples"):
        return cast(Tensor, groups()) if callable(groups) else None


def make_partition(spec: PartitionSpec, labels: Tensor, groups: Tensor | None = None) -> list[Tensor]:
    """The examples of each client, as sorted int64 index tensors.

    labels: class numbers [M]; groups: number [M] of each example's writer, person or speaker, for "natural". Raises
    TaskError if there are fewer examples than clients, if labels are not class numbers, or if the spec cannot be met
    with this data.
    """
    _check_numbers("class", labels)
    if len(labels) < spec.clients:
        raise TaskError(f"expected at least one example for each of {spec.clients} clients, got {len(labels)} in all")
    numbers = _groups(groups, labels) if spec.method == "natural" else labels
    compact: Indices = np.unique(numbers.cpu().numpy(), return_inverse=True)[1].astype(np.int64)
    parts = SPLITS[spec.method](compact, spec, np.random.default_rng(spec.seed))
    return [torch.from_numpy(np.sort(part)) for part in parts]


def _groups(groups: Tensor | None, labels: Tensor) -> Tensor:
    if groups is None:
        raise TaskError(
            'the partition method "natural" needs group numbers, and this task provides none: give it a method'
            " train_groups() -> Tensor [M], or choose another partition method"
        )
    _check_numbers("group", groups)
    if len(groups) != len(labels):
        raise TaskError(f"expected a group number for each of {len(labels)} examples, got {len(groups)}")
    return groups


def _check_numbers(kind: str, numbers: Tensor) -> None:
    if numbers.ndim != 1 or numbers.is_floating_point():
        came = f"{numbers.dtype} of shape {list(numbers.shape)}"
        raise TaskError(f"expected one {kind} number for each example, got {came}")
