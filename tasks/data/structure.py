"""A batch of any structure, nested from dicts, tuples, lists and dataclasses: its tensors, its size, its device.

`algorithms.batches` has the same rules; the two packages do not import each other.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from tasks.errors import TaskError

Batch = Any
"""A tensor, or any nested structure of tensors. The examples lie along the first dimension of its tensors."""


def is_pair(batch: Batch) -> bool:
    """Whether a batch is two tensors, (inputs, targets)."""
    return (
        isinstance(batch, tuple | list)
        and len(batch) == 2
        and isinstance(batch[0], Tensor)
        and isinstance(batch[1], Tensor)
    )


def examples_of(batch: Batch) -> int:
    """The number of examples: the first dimension of the first tensor that has one. Raises TaskError for none."""
    for tensor in tensors_of(batch):
        if tensor.dim():
            return len(tensor)
    raise TaskError(
        "expected a batch of tensors with the examples along their first dimension, got a batch of type"
        f" {type(batch).__name__} without such a tensor: make tensors of its parts in `collate`"
    )


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """The tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
        return
    for part in _parts(batch).values():
        yield from tensors_of(part)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch on a device. An object of another type moves if it has a method `to`."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=device.type == "cuda")
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    parts = _parts(batch)
    return _rebuilt(batch, {key: to_device(part, device) for key, part in parts.items()}) if parts else batch


def _parts(batch: Batch) -> Mapping[Any, Any]:
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, tuple | list):
        return dict(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {}


def _rebuilt(batch: Batch, parts: Mapping[Any, Any]) -> Batch:
    if isinstance(batch, tuple):
        return type(batch)(*parts.values()) if hasattr(batch, "_fields") else tuple(parts.values())
    if isinstance(batch, list):
        return list(parts.values())
    if isinstance(batch, Mapping):
        if not isinstance(batch, MutableMapping) or type(batch) is dict:
            return dict(parts)
        clone = copy.copy(batch)
        clone.update(parts)
        return clone
    clone = copy.copy(batch)
    for name, part in parts.items():
        object.__setattr__(clone, name, part)  # a frozen dataclass too
    return clone
