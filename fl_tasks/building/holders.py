"""Finds out whether anything outside a module holds a part of it.

A task may return the same module twice, or modules with the same backbone in them. Values that are written into such a
module, and memory that is released under it, would change under another holder.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import MethodType
from typing import cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from algorithms.model_state import state_tensors

_HOLDERS = (dict, list, tuple, set, MethodType)


def held_outside(owner: list[nn.Module]) -> bool:
    """Whether anything but this list of one module may hold the module, a part of it, or memory of its values.

    True is also returned for holders inside of the module that this function does not know, such as closures.
    """
    inner: Counter[int] = Counter({id(owner[0]): 1})
    parts: list[object] = [owner[0]]
    _collect(parts, inner)
    counts = [sys.getrefcount(part) for part in parts]
    [usual] = [sys.getrefcount(part) for part in [object()]]
    if any(count - usual > inner[id(part)] for part, count in zip(parts, counts, strict=True)):
        return True
    return _memory_is_shared([part for part in parts if isinstance(part, Tensor)], owner[0])


def survives(owner: list[nn.Module]) -> bool:
    """Let go of the module in this list. Returns whether memory of its values is still held by anything."""
    memories = [StorageWeakRef(each.untyped_storage()) for each in state_tensors(owner.pop()) if each.numel()]
    if all(memory.expired() for memory in memories):
        return False
    gc.collect()  # modules of some libraries refer to themselves
    return not all(memory.expired() for memory in memories)


def _collect(parts: list[object], inner: Counter[int]) -> None:
    """Add all modules and tensors below the first part, and count the references to each that are found there."""
    seen, waiting = {id(parts[0])}, [iter(vars(parts[0]).values())]
    while waiting:
        for each in waiting.pop():
            if isinstance(each, nn.Module | Tensor):
                inner[id(each)] += 1
                if id(each) not in seen:
                    seen.add(id(each))
                    parts.append(each)
                    waiting.append(iter(vars(each).values()))
            elif isinstance(each, _HOLDERS) and each and id(each) not in seen:
                seen.add(id(each))
                waiting.append(_held_by(each))


def _held_by(holder: object) -> Iterator[object]:
    """What a container or a bound method holds."""
    if isinstance(holder, dict):
        return iter(holder.values())
    return iter([holder.__self__]) if isinstance(holder, MethodType) else iter(cast(Iterable[object], holder))


def _memory_is_shared(tensors: Sequence[Tensor], module: nn.Module) -> bool:
    """Whether the memory of the module's values has more users than these tensors, and those that they are views of."""
    bases = {id(base): base for each in tensors if (base := each._base) is not None}  # noqa: SLF001 - torch documents it
    users = Counter(each.untyped_storage().data_ptr() for each in [*tensors, *bases.values()])
    usual = _users(torch.empty(1)) - 1
    return any(
        _users(each) - usual > users[each.untyped_storage().data_ptr()]
        for each in state_tensors(module)
        if each.numel()
    )


def _users(tensor: Tensor) -> int:
    """Number of references to a tensor's memory, with the one that asking for it makes."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch has no other
    return count
