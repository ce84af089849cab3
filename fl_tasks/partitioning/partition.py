"""Partitions a data set among clients by a seed, with the methods of the federated learning papers.

No example is assigned twice. The same spec and labels give the same partition with the same version of NumPy. If the
devices' versions differ, make the partition once and install it as a file (`fl_tasks.partitioning.file`). Size, class
numbers and group numbers of a task's whole training set are each read only where a partition needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_tasks.base import Task
from fl_tasks.data.examples import Examples
from fl_tasks.data.forms import Data, as_data
from fl_tasks.data.samples import Samples
from fl_tasks.data.shard import Shard
from fl_tasks.errors import TaskError, task_code
from fl_tasks.partitioning.methods import (
    Indices,
    dirichlet_balanced,
    dirichlet_class,
    dirichlet_hsu,
    few_classes,
    iid,
    natural,
    shards,
)
from fl_tasks.partitioning.spec import Method, PartitionSpec


def training_size(task: Task) -> int:
    """M, the examples that a shard's indices refer to: `train_size()`, or the length of labels, groups or data.

    Raises TaskError, naming `train_size`, if none of them can be read.
    """
    if callable(size := getattr(task, "train_size", None)):
        with task_code("the task's train_size()"):
            declared = size()
        if not isinstance(declared, int) or declared < 0:
            raise TaskError(f"expected train_size() to return the number of training examples, got {declared!r}")
        return declared
    for name in ("train_labels", "train_groups"):
        if callable(method := getattr(task, name, None)):
            with task_code(f"the task's {name}()"):
                return len(method())
    return len(_whole(task, "the number of training examples", "train_size() -> int"))


def training_labels(task: Task) -> Tensor:
    """Class numbers [M] of a task's whole training set, in the order of a shard's indices.

    They are the result of `train_labels()`, or the targets of Examples or of a torchvision data set. Raises TaskError,
    naming `train_labels`, for a task whose data has no class numbers.
    """
    if callable(labels := getattr(task, "train_labels", None)):
        with task_code("reading the task's training labels"):
            return _as_tensor(labels())
    data = _whole(task, "the class of each example", _TRAIN_LABELS)
    numbers = _class_numbers(data)
    if numbers is None:
        raise TaskError(
            f"partitions by class need the class of each example, and the task's data has none ({_described(data)}):"
            f' add a method {_TRAIN_LABELS} to the task, or choose the partition method "iid", or "natural" with a'
            " method train_groups()"
        )
    return numbers


def training_groups(task: Task) -> Tensor | None:
    """Group numbers [M], in the same order; None for a task without `train_groups`."""
    groups = getattr(task, "train_groups", None)
    with task_code("reading the groups of the task's training examples"):
        return _as_tensor(groups()) if callable(groups) else None


_TRAIN_LABELS = "train_labels() -> Tensor [M] of class numbers"


def _whole(task: Task, what: str, method: str) -> Data:
    try:
        with task_code("the task's train_data(Shard())"):
            return as_data(task.train_data(Shard()))
    except TaskError as error:
        raise TaskError(
            f"a partition needs {what}, which cannot be read from train_data(Shard()): {error}. Add a method {method}"
            " to the task; devices with a folder each need no partition: a simulation has simulation.folders"
        ) from error


def _class_numbers(data: Data) -> Tensor | None:
    """Whole numbers, one for each example; None if the data has something else."""
    if isinstance(data, Examples):
        targets: Any = data.targets
    elif isinstance(data, Samples):
        targets = getattr(data.dataset, "targets", None)  # of torchvision's data sets
    else:
        return None
    if isinstance(targets, Sequence) and targets and all(isinstance(target, int) for target in targets):
        targets = torch.tensor(targets)
    if not isinstance(targets, Tensor) or targets.dim() != 1 or len(targets) != len(data):
        return None
    return None if targets.is_floating_point() or targets.is_complex() else targets


def _described(data: Data) -> str:
    if isinstance(data, Examples):
        return f"its targets are {data.targets.dtype} of shape {list(data.targets.shape)}"
    return f"it is {type(data).__name__} without class numbers"


def _as_tensor(numbers: Any) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else torch.as_tensor(numbers)


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
    if total < (least := spec.clients or 1):
        raise TaskError(f"expected at least one example for each of {least} clients, got {total} in all")
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
