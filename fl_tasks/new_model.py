"""Makes the task's model. Its values are in memory of its own, and of a form that can be sent.

A task may return the same module twice, or modules with the same backbone in them. Values that are written into such a
module, and memory that is released under it, would change under another holder. So nobody else may hold what server
and devices fill with values.

Options of a task may size its model: the memory of the tensors that building it takes is limited. The size of a new
tensor is compared before it is made, so that too large a model costs nothing. The model is not built on the device
"meta" first: a task that loads its backbone once would keep one without values.
"""

from __future__ import annotations

import copy
import gc
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from inspect import isfunction
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from algorithms.model_state import state_tensors
from algorithms.outside_code import described, is_interrupt
from fl_tasks.base import Task
from fl_tasks.errors import TaskError, task_call

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
        """The storages by the address of their memory, which may be used again once it is free."""

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
        self._made = {at: made for at, made in self._made.items() if not made[0].expired()}
        self._total = sum(size for _, size in self._made.values())
        if self._total + more > self._max_bytes:
            raise ModelTooLarge(f"{self._total + more} bytes")


def _bytes_asked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Bytes of the tensor that a factory such as torch.empty makes; 0 for an operation on tensors."""
    leaves = tree_leaves([args, kwargs])
    if any(isinstance(leaf, Tensor) for leaf in leaves) or str(kwargs.get("device", "")) == "meta":
        return 0
    shapes = [arg for arg in args if isinstance(arg, list | tuple) and all(isinstance(size, int) for size in arg)]
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return math.prod(shapes[0]) * dtype.itemsize if shapes else 0


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
    memories = [StorageWeakRef(tensor.untyped_storage()) for tensor in state_tensors(owner.pop()) if tensor.numel()]
    if all(memory.expired() for memory in memories):
        return False
    gc.collect()  # modules of some libraries refer to themselves
    return not all(memory.expired() for memory in memories)


def _collect(parts: list[object], inner: Counter[int]) -> None:
    """Add all modules and tensors below the first part, and count the references to each that are found there."""
    seen, waiting = {id(parts[0])}, [iter(vars(parts[0]).values())]
    while waiting:
        for part in waiting.pop():
            if isinstance(part, nn.Module | Tensor):
                inner[id(part)] += 1
                if id(part) not in seen:
                    seen.add(id(part))
                    parts.append(part)
                    waiting.append(iter(vars(part).values()))
            elif isinstance(part, _HOLDERS) and part and id(part) not in seen:
                seen.add(id(part))
                waiting.append(_held_by(part))


def _held_by(holder: object) -> Iterator[object]:
    """What a container or a bound method holds."""
    if isinstance(holder, dict):
        return iter(holder.values())
    return iter([holder.__self__]) if isinstance(holder, MethodType) else iter(cast(Iterable[object], holder))


def _memory_is_shared(tensors: Sequence[Tensor], module: nn.Module) -> bool:
    """Whether the memory of the module's values has more users than these tensors, and those that they are views of."""
    bases = {id(base): base for tensor in tensors if (base := tensor._base) is not None}  # noqa: SLF001 - torch documents it
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in [*tensors, *bases.values()])
    usual = _users(torch.empty(1)) - 1
    return any(
        _users(tensor) - usual > users[tensor.untyped_storage().data_ptr()]
        for tensor in state_tensors(module)
        if tensor.numel()
    )


def _users(tensor: Tensor) -> int:
    """Number of references to a tensor's memory, with the one that asking for it makes."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch has no other
    return count


def new_model(task: Task, max_bytes: int = 0) -> nn.Module:
    """A new model of the task, which nobody else holds: writing into its values, or releasing them, affects no other.

    The same values come from the same state of torch's default generator. A task that returns the same module, or the
    same parts, again and again gets copies of them. Values with strides of 0 or gaps are made contiguous.

    max_bytes: of the tensors that building it takes; 0: any.

    Raises TaskError for a result that is no module, or has no values to send; ModelTooLarge.
    """
    before = torch.get_rng_state()
    owner = [_made(task, max_bytes)]
    if held_outside(owner):
        copied = survives(owner)
        torch.set_rng_state(before)
        owner.append(_made(task, max_bytes))
        if copied:
            owner.append(_copied(owner.pop()))
    _make_plain(owner[0])
    return owner.pop()


def remarks_on(module: nn.Module) -> tuple[str, ...]:
    """What its author should know of a model that can be trained, as lines of text."""
    parts = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    others = sorted(module.state_dict().keys() - {name for name, _ in parts})
    if not others:
        return ()
    remark = (
        f"{others[0]!r} of the model's state_dict ({len(others)} such) is neither a parameter nor a buffer, as that of"
        " get_extra_state(): it is not sent, averaged or exported"
    )
    return (remark,)


def _made(task: Task, max_bytes: int) -> nn.Module:
    with task_call("the task's model()"):
        module: object = _limited(task, max_bytes)
        if not isinstance(module, nn.Module):
            raise TaskError(f"the task's model(): expected a torch.nn.Module with values, got {_described(module)}")
        names = {*module.state_dict(), *dict(module.named_parameters())}
    if max_bytes and (size := sum(tensor.nbytes for tensor in state_tensors(module))) > max_bytes:
        raise ModelTooLarge(f"{size} bytes")  # of files, which are not counted while they are read
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in named.items():
        if name in names and (why := _without_values(tensor)):
            raise TaskError(f"the task's model(): expected a torch.nn.Module with values, got {name!r} {why}")
    return module


def _limited(task: Task, max_bytes: int) -> object:
    with SizeLimit(max_bytes) if max_bytes else nullcontext():
        return task.model()


def _described(model: object) -> str:
    if model is None:
        return "None: is its return statement missing?"
    if isinstance(model, type):
        return f"the class {model.__name__}: return an instance of it"
    if isfunction(model):
        return f"the function {model.__name__}: put it into the forward() of a module"
    return f"an object of type {type(model).__name__}"


def _without_values(tensor: Tensor) -> str:
    """Why a parameter or buffer has no values that can be sent; empty if it has."""
    if is_lazy(tensor):
        return "of a lazy module, which has no shape yet: give its sizes, or pass one batch through it in model()"
    if tensor.device.type == "meta":
        return 'on the device "meta", where tensors have no values: make it on the CPU'
    if tensor.layout != torch.strided or tensor.is_quantized:
        form = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        return f"in the form {form}: only plain (strided) tensors can be sent"
    return ""


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise TaskError(
            "the task's model() returned the same module, or parts of it, twice, and they cannot be copied"
            f" ({described(error)}): make a new one in each call"
        ) from error


def _make_plain(module: nn.Module) -> None:
    """Give each value a place of its own in contiguous memory. channels_last stays."""
    with torch.no_grad():
        for tensor in state_tensors(module):
            if not _is_plain(tensor):
                tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)


def _is_plain(tensor: Tensor) -> bool:
    changes = tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    if changes and not tensor.untyped_storage().resizable():
        return False  # memory of numpy or of a file: training would write into it
    return (
        tensor.is_contiguous()
        or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        or (tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d))
    )
