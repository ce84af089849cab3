"""Labels by the names of their classes: two sites that number the same classes differently train a meaningless model.

If a task names its classes, the labels of `Examples` are checked once, when they are loaded. Those of data that is read
batch by batch are checked in each batch, before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.utils.data import Subset

from fl_tasks.data.examples import IGNORED, Examples, LabelRange, shown
from fl_tasks.data.forms import Data
from fl_tasks.data.samples import Samples
from fl_tasks.errors import TaskError, task_code


def class_names(task: object) -> tuple[str, ...]:
    """The names of a task's classes in the order of their numbers; empty if it names none. Raises TaskError.

    Only a list or tuple of strings is meant: a task may have a number under this name.
    """
    with task_code("reading the task's classes"):
        classes = getattr(task, "classes", None)
    if not isinstance(classes, list | tuple) or not all(isinstance(name, str) for name in classes):
        return ()
    return _names(classes, "the task's classes") if classes else ()


def numbered(task: object, data: Data, what: str) -> Data:
    """The data with labels that are the task's class numbers. Unchanged if the task names no classes.

    Examples that name their classes in another order get the task's numbers. Raises TaskError for a label out of range,
    for a class that the task does not have, and for a data set read example by example that numbers them otherwise.
    Data that is read batch by batch raises it for a label out of range when it reads that batch.

    what: the data in words, for errors.
    """
    if not (classes := class_names(task)):
        return data
    if isinstance(data, Examples):
        if data.classes is not None:
            data = _renumbered(data, _names(data.classes, f"the classes of {what}"), classes, what)
        LabelRange(classes, what).check(data.targets)
        return data
    if isinstance(data, Samples):
        _check_same(data, classes, what)
    return replace(data, label_range=LabelRange(classes, what))


def _names(classes: Sequence[str], what: str) -> tuple[str, ...]:
    names = () if isinstance(classes, str) else tuple(classes)
    texts = [name for name in names if isinstance(name, str) and name.isprintable() and name]
    if len(names) < 2 or len({*texts}) < len(names):
        raise TaskError(f"{what}: expected two or more different names as a list of strings, got {str(classes)[:200]}")
    return names


def _renumbered(data: Examples, own: tuple[str, ...], classes: tuple[str, ...], what: str) -> Examples:
    if own == classes:
        return data
    LabelRange(own, what).check(data.targets)
    number = {name: at for at, name in enumerate(classes)}
    table = torch.tensor([number.get(name, -1) for name in own], device=data.targets.device)
    kept = data.targets == IGNORED
    targets = torch.where(kept, IGNORED, table[data.targets.masked_fill(kept, 0).long()])
    if len(unknown := data.targets[targets == -1]):
        raise TaskError(
            f"{what}: expected the classes {shown(classes)}, got {len(unknown)} labels of others, as"
            f" {own[int(unknown[0])]!r}: leave these examples out, or add the class to the task"
        )
    return replace(data, targets=targets.to(data.targets.dtype), classes=classes)


def _check_same(data: Samples, classes: tuple[str, ...], what: str) -> None:
    dataset: object = data.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    own = getattr(dataset, "classes", None)  # of torchvision's folders and data sets
    if isinstance(own, list | tuple) and own and tuple(own) != classes:
        raise TaskError(
            f"{what}: expected the classes {shown(classes)} in this order, got {shown(own)} from"
            f" {type(dataset).__name__}: give it a target_transform that returns the task's numbers, and its classes"
        )
