"""Size, class numbers and group numbers of a task's whole training set, each read only where a partition needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl_tasks.base import Task
from fl_tasks.data.examples import Examples
from fl_tasks.data.forms import Data, as_data
from fl_tasks.data.samples import Samples
from fl_tasks.data.shard import Shard
from fl_tasks.errors import TaskError, task_code


def training_size(task: Task) -> int:
    """M, the examples that a shard's indices refer to: `train_size()`, or the length of labels, groups or data.

    Raises TaskError, naming `train_size`, if none of them can be read.
    """
    if callable(size := getattr(task, "train_size", None)):
        with task_code("the task's train_size()"):
            found = size()
        if not isinstance(found, int) or found < 0:
            raise TaskError(f"expected train_size() to return the number of training examples, got {found!r}")
        return found
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
    found = _class_numbers(data)
    if found is None:
        raise TaskError(
            f"partitions by class need the class of each example, and the task's data has none ({_described(data)}):"
            f' add a method {_TRAIN_LABELS} to the task, or choose the partition method "iid", or "natural" with a'
            " method train_groups()"
        )
    return found


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
            " to the task"
        ) from error


def _class_numbers(data: Data) -> Tensor | None:
    """Whole numbers, one for each example; None if the data has something else."""
    if isinstance(data, Examples):
        found: Any = data.targets
    elif isinstance(data, Samples):
        found = getattr(data.dataset, "targets", None)  # of torchvision's data sets
    else:
        return None
    if isinstance(found, Sequence) and found and all(isinstance(each, int) for each in found):
        found = torch.tensor(found)
    if not isinstance(found, Tensor) or found.dim() != 1 or len(found) != len(data):
        return None
    return None if found.is_floating_point() or found.is_complex() else found


def _described(data: Data) -> str:
    if isinstance(data, Examples):
        return f"its targets are {data.targets.dtype} of shape {list(data.targets.shape)}"
    return f"it is {type(data).__name__} without class numbers"


def _as_tensor(numbers: Any) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else torch.as_tensor(numbers)
