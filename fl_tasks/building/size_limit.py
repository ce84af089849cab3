"""Limits the memory of the tensors that building a model takes. Options of a task may size its model.

The size of a new tensor is compared before it is made, so that too large a model costs nothing. The model is not built
on the device "meta" first: a task that loads its backbone once would keep one without values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fl_tasks.errors import TaskError

_LEAST_BYTES = 4096
"""What a tensor counts at least: with its module it takes about as much."""


class ModelTooLarge(TaskError):
    """A model would take more memory than allowed. The text has the bytes that it had reached."""


class SizeLimit(TorchDispatchMode):
    """Within this context, the tensors of this thread that are made and kept take at most some bytes."""

    def __init__(self, max_bytes: int) -> None:
        """Raises ModelTooLarge where they would take more."""
        super().__init__()  # type: ignore[no-untyped-call] # torch has no types here
        self._max_bytes, self._total = max_bytes, 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        """By the address of the memory, which may be used again once it is free."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's hook. True would import torch's compiler: over two seconds in the process of each task."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called for each operation of torch."""
        del types
        kwargs = kwargs or {}
        self._require(_bytes_asked(args, kwargs))
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta" and tensor.layout == torch.strided:
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        known = self._made.get(memory.data_ptr())
        if known is not None and not known[0].expired():
            return
        size = max(memory.nbytes(), _LEAST_BYTES)
        self._total += size - (0 if known is None else known[1])
        self._made[memory.data_ptr()] = StorageWeakRef(memory), size
        self._require(0)

    def _require(self, more: int) -> None:
        if self._total + more <= self._max_bytes:
            return
        self._made = {at: each for at, each in self._made.items() if not each[0].expired()}
        self._total = sum(size for _, size in self._made.values())
        if self._total + more > self._max_bytes:
            raise ModelTooLarge(f"{self._total + more} bytes")


def _bytes_asked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Bytes of the tensor that a factory such as torch.empty makes; 0 for an operation on tensors."""
    leaves = tree_leaves([args, kwargs])
    if any(isinstance(each, Tensor) for each in leaves) or str(kwargs.get("device", "")) == "meta":
        return 0
    shapes = [each for each in args if isinstance(each, list | tuple) and all(isinstance(size, int) for size in each)]
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return math.prod(shapes[0]) * dtype.itemsize if shapes else 0
