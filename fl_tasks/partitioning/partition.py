"""Partitions a data set among clients by a seed, with the methods of the federated learning papers.

No example is assigned twice. The same spec and labels give the same partition with the same version of NumPy. If the
devices' versions differ, make the partition once and install it as a file (`fl_tasks.partitioning.file`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from fl_tasks.base import Task
from fl_tasks.errors import TaskError
from fl_tasks.partitioning.by_class import dirichlet_class
from fl_tasks.partitioning.contiguous import iid, natural, shards
from fl_tasks.partitioning.mixture import dirichlet_balanced, dirichlet_hsu, few_classes
from fl_tasks.partitioning.sizes import Indices
from fl_tasks.partitioning.spec import Method, PartitionSpec
from fl_tasks.partitioning.training_set import training_groups, training_labels, training_size

__all__ = [
    "Method",
    "PartitionSpec",
    "make_partition",
    "partition_task",
    "training_groups",
    "training_labels",
    "training_size",
]

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


def partition_task(spec: PartitionSpec, task: Task) -> list[Tensor]:
    """A task's training set among clients, as `make_partition`. It needs only what the method reads.

    Raises TaskError with the method that the task must have.
    """
    return make_partition(
        spec,
        training_labels(task) if spec.reads_classes else None,
        training_groups(task) if spec.method == "natural" else None,
        size=training_size(task),
    )


def make_partition(
    spec: PartitionSpec, labels: Tensor | None, groups: Tensor | None = None, *, size: int | None = None
) -> list[Tensor]:
    """The examples of each client, as sorted int64 index tensors.

    labels: class numbers [M], for methods by class; groups: number [M] of each example's writer, person or speaker,
    for "natural"; size: M, for "iid" and "natural", where labels are not read. Raises TaskError if there are fewer
    examples than clients, if labels are not class numbers, or if the spec cannot be met with this data.
    """
    if labels is None and (size is None or spec.reads_classes):
        raise TaskError(f'the partition method "{spec.method}" needs the class number of each example, got none')
    total = len(labels) if labels is not None else int(size or 0)
    if total < spec.clients:
        raise TaskError(f"expected at least one example for each of {spec.clients} clients, got {total} in all")
    if spec.method == "natural":
        numbers = _groups(groups, total)
    elif spec.reads_classes and labels is not None:
        _check_numbers("class", labels)
        numbers = labels
    else:
        numbers = torch.zeros(total, dtype=torch.int64)
    compact: Indices = np.unique(numbers.cpu().numpy(), return_inverse=True)[1].astype(np.int64)
    parts = SPLITS[spec.method](compact, spec, np.random.default_rng(spec.seed))
    return [torch.from_numpy(np.sort(part)) for part in parts]


def _groups(groups: Tensor | None, total: int) -> Tensor:
    if groups is None:
        raise TaskError(
            'the partition method "natural" needs group numbers, and this task provides none: give it a method'
            " train_groups() -> Tensor [M], or choose another partition method"
        )
    _check_numbers("group", groups)
    if len(groups) != total:
        raise TaskError(f"expected a group number for each of {total} examples, got {len(groups)}")
    return groups


def _check_numbers(kind: str, numbers: Tensor) -> None:
    if numbers.ndim != 1 or numbers.is_floating_point():
        came = f"{numbers.dtype} of shape {list(numbers.shape)}"
        raise TaskError(f"expected one {kind} number for each example, got {came}")
