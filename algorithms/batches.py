"""A batch of examples with any structure: move it to a device, count its examples, and split it.

A batch is a tensor, or a dict, tuple, list or dataclass of batches, to any depth. Other values in it, such as strings
and None, stay as they are. The examples lie along the first dimension of its tensors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Batch = Any
"""A tensor, or any nested structure of tensors."""

Forward = Callable[[nn.Module, Batch], tuple[Any, Any]]
"""(model, batch) -> (output, target), the two arguments of the loss. The batch is on the model's device."""


def forward_pair(model: nn.Module, batch: Batch) -> tuple[Any, Any]:
    """The forward pass of a batch (inputs, targets): model(inputs), targets."""
    inputs, targets = batch
    return model(inputs), targets


def is_pair(batch: Batch) -> bool:
    """Whether a batch is two tensors, (inputs, targets)."""
    return (
        isinstance(batch, tuple | list)
        and len(batch) == 2
        and isinstance(batch[0], Tensor)
        and isinstance(batch[1], Tensor)
    )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch on a device. An object of another type moves if it has a method `to`.

    Copies to a GPU are asynchronous, which is faster from pinned memory and safe from any memory.
    """
    asynchronous = device.type == "cuda"

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=asynchronous)
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf

    return map_leaves(moved, batch)


@dataclasses.dataclass(frozen=True, slots=True)
class Apart:
    """Examples that were made one by one, so that nothing of one is in another; not a batch that a model takes."""

    parts: tuple[Batch, ...]
    """Batches of examples with the same shapes."""

    @classmethod
    def of(cls, examples: Iterable[Batch]) -> Apart:
        """Put batches of one example together where their tensors have the same shapes, in their order."""
        groups: dict[Any, list[Batch]] = {}
        for number, one in enumerate(examples):
            parts = list(leaves(one))
            fits = all(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == 1 for leaf in parts)
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in parts) if fits else number
            groups.setdefault((repr(map_leaves(lambda _: 0, one)), shapes), []).append(one)
        return cls(tuple(map(_joined, groups.values())))


def _joined(group: Sequence[Batch]) -> Batch:
    if len(group) == 1:
        return group[0]
    joined = iter([torch.cat(column) for column in zip(*map(leaves, group), strict=True)])
    return map_leaves(lambda _: next(joined), group[0])


def examples_of(batch: Batch) -> int:
    """The number of examples: the size of the first dimension of the first tensor that has one.

    Raises ValueError for a batch without such a tensor.
    """
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise ValueError(
        "expected a batch of tensors with the examples along their first dimension, got a batch of type "
        f"{type(batch).__name__} without such a tensor"
    )


def split(batch: Batch, size: int) -> list[Batch]:
    """The batch in parts of `size` examples along the first dimension; the last part may be smaller.

    A tensor whose first dimension is not the number of examples is in every part, and so are values of other types,
    apart from lists of one string or number per example.

    Raises ValueError for a size under 1, and for a batch without a tensor.
    """
    if size < 1:
        raise ValueError(f"expected parts of 1 or more examples, got {size}")
    total = examples_of(batch)
    if total <= size:
        return [batch]
    return [_part(batch, total, slice(start, start + size)) for start in range(0, total, size)]


def map_leaves(function: Callable[[Any], Any], batch: Batch) -> Batch:
    """A batch of the same structure with `function` applied to its tensors and to values of other types."""
    # Pairs of tensors are the usual batches of a fast step.
    if type(batch) is tuple and is_pair(batch):
        return function(batch[0]), function(batch[1])
    if isinstance(batch, Tensor):
        return function(batch)
    children = _children(batch)
    if children is None:
        return function(batch)
    return _rebuilt(batch, {key: map_leaves(function, child) for key, child in children.items()})


def leaves(batch: Batch) -> Iterator[Any]:
    """The tensors and the values of other types in a batch, in order."""
    children = None if isinstance(batch, Tensor) else _children(batch)
    if children is None:
        yield batch
        return
    for child in children.values():
        yield from leaves(child)


def _children(batch: Batch) -> Mapping[Any, Any] | None:
    """The parts of a structure by key, position or field; None for a leaf."""
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, tuple | list):
        # A packed sequence is a named tuple whose parts do not make sense alone. It has a method `to`.
        return None if callable(getattr(batch, "to", None)) else dict(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type) and not callable(getattr(batch, "to", None)):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return None


def _rebuilt(batch: Batch, children: Mapping[Any, Any]) -> Batch:
    """A structure of the same type with other parts."""
    if isinstance(batch, Mapping):
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return dict(children)
        clone = copy.copy(batch)  # a library's own mapping keeps its attributes
        clone.update(children)
        return clone
    if isinstance(batch, tuple):
        values = children.values()
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    if isinstance(batch, list):
        return list(children.values())
    clone = copy.copy(batch)
    for name, value in children.items():
        object.__setattr__(clone, name, value)  # a frozen dataclass too
    return clone


def _part(batch: Batch, total: int, which: slice) -> Batch:
    """The examples `which` of a batch of `total`."""
    if isinstance(batch, Tensor):
        return batch[which] if batch.dim() and len(batch) == total else batch
    children = _children(batch)
    if children is None:
        if callable(getattr(batch, "to", None)):
            raise ValueError(f"expected a batch of tensors to split, got {type(batch).__name__} in it")
        return batch
    plain = isinstance(batch, tuple | list) and not any(isinstance(leaf, Tensor) for leaf in leaves(batch))
    if plain:
        return batch[which] if len(batch) == total and not hasattr(batch, "_fields") else batch
    return _rebuilt(batch, {key: _part(child, total, which) for key, child in children.items()})
