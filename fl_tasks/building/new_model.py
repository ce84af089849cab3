"""Makes the task's model. Its values are in memory of its own, and of a form that can be sent."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from inspect import isfunction

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from algorithms.model_state import state_tensors
from algorithms.outside_code import described, is_interrupt
from fl_tasks.base import Task
from fl_tasks.building.holders import held_outside, survives
from fl_tasks.building.size_limit import ModelTooLarge, SizeLimit
from fl_tasks.errors import TaskError, task_call


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


def _described(found: object) -> str:
    if found is None:
        return "None: is its return statement missing?"
    if isinstance(found, type):
        return f"the class {found.__name__}: return an instance of it"
    if isfunction(found):
        return f"the function {found.__name__}: put it into the forward() of a module"
    return f"an object of type {type(found).__name__}"


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
