"""Reads and writes a torch model as named tensors: trainable parameters, buffers and frozen parameters.

Some parameters and buffers may be personal: a client trains them and keeps them. For the server they do not change, so
they belong to the frozen part there, with their initial values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from algorithms import tree
from algorithms.base import Tensors
from algorithms.precision import rounded_like


@dataclass(frozen=True, slots=True)
class ModelState:
    """All values of a model, by their names in `named_parameters` and `named_buffers`."""

    trainable: Tensors
    """Parameters with requires_grad: the x of the formulas, and the tensors of a delta."""
    buffers: Tensors
    """Persistent buffers, floating ones first. Floating ones are averaged; of integers the maximum is taken."""
    frozen: Tensors
    """The other parameters, and all personal values: sent to a client once, never back."""


def read_state(model: nn.Module) -> ModelState:
    """Copies of the model's values, on its device. A parameter or buffer that is shared appears once."""
    views = state_views(model)
    return ModelState(*(tree.map(torch.clone, part) for part in (views.trainable, views.buffers, views.frozen)))


def state_views(model: nn.Module, personal: Collection[str] = ()) -> ModelState:
    """Views of the model's values outside autograd. They share its memory.

    personal: names of the parameters and buffers that are personal.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shared = {name for name, parameter in model.named_parameters() if parameter.requires_grad}.difference(personal)
    buffers = _buffers(model)
    return ModelState(
        {name: tensor for name, tensor in parameters.items() if name in shared},
        {name: tensor for name, tensor in buffers.items() if name not in personal},
        {
            **{name: tensor for name, tensor in parameters.items() if name not in shared},
            **{name: tensor for name, tensor in buffers.items() if name in personal},
        },
    )


def personal_names(model: nn.Module, patterns: Iterable[str]) -> frozenset[str]:
    """The names of the trainable parameters and persistent buffers that match one of the patterns, as in the shell.

    Raises:
        ValueError: a pattern matches nothing, only a second name of a shared weight, or together they match all
            trainable parameters.
    """
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    patterns, known = tuple(patterns), [*trainable, *_buffers(model)]
    personal = {name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)}
    tied = tied_names(model)
    for pattern in patterns:
        for name, of in tied.items():
            if fnmatchcase(name, pattern) and of not in personal:
                raise ValueError(
                    f"the pattern {pattern!r} matches {name} and no pattern {of}, which is the same weight"
                )
        if not any(fnmatchcase(name, pattern) for name in (*known, *tied)):
            raise ValueError(
                f"the pattern {pattern!r} matches no trainable parameter and no buffer; there are {_shown(known)}"
            )
    if personal and personal.issuperset(trainable):
        raise ValueError("the patterns match all trainable parameters, so nothing is left to train together")
    return frozenset(personal)


def read_buffers(model: nn.Module, personal: Collection[str] = ()) -> Tensors:
    """Copies of the model's persistent buffers that are not personal, on its device."""
    return {name: buffer.clone() for name, buffer in _buffers(model).items() if name not in personal}


def tied_names(model: nn.Module) -> dict[str, str]:
    """The further names of shared parameters and persistent buffers in the state_dict -> the name in `ModelState`."""
    first = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {name: first[id(tensor)] for name, tensor in every if first[id(tensor)] != name}
    # Only the state dict shows which buffers are persistent.
    persistent = model.state_dict().keys() if names else ()
    return {name: of for name, of in names.items() if name in persistent}


def load_state(model: nn.Module, state: ModelState) -> None:
    """Copy all of `state` into the model, across devices. A server's float32 is rounded to a model of lower precision.

    Raises:
        ValueError: a name is missing or unknown, or a shape or dtype differs. Nothing is copied then.
    """
    fill(state_views(model), state)


def fill(views: ModelState, state: ModelState) -> None:
    """`load_state` for the model that these views belong to."""
    parts = (
        ("trainable parameters", views.trainable, rounded_like(views.trainable, state.trainable)),
        ("buffers", views.buffers, state.buffers),
        ("frozen parameters", views.frozen, state.frozen),
    )
    for what, current, given in parts:
        tree.check_layout(current, given, what)
    for _, current, given in parts:
        for name, tensor in current.items():
            tensor.copy_(given[name])


def trainable_views(model: nn.Module, personal: Collection[str] = ()) -> Tensors:
    """Views of the trainable parameters that are not personal, outside autograd. Writing into one changes the model."""
    return {name: parameter.detach() for name, parameter in trainable_parameters(model).items() if name not in personal}


def personal_views(model: nn.Module, personal: Collection[str]) -> Tensors:
    """Views of the personal parameters and buffers outside autograd. Writing into a view changes the model."""
    values = {**trainable_views(model), **_buffers(model)}
    return {name: tensor for name, tensor in values.items() if name in personal}


def trainable_parameters(model: nn.Module) -> Tensors:
    """The trainable parameters themselves, which hold autograd's gradients."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def state_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The parameters and persistent buffers themselves, each once."""
    buffers = dict(model.named_buffers())
    persistent = model.state_dict().keys() if buffers else ()
    return [*model.parameters(), *(buffer for name, buffer in buffers.items() if name in persistent)]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode within the block."""
    # For each module: a task may keep parts of its model, such as batch norms, in evaluation mode.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _buffers(model: nn.Module) -> Tensors:
    named = dict(model.named_buffers())
    # Only the state dict shows which buffers are persistent.
    persistent = model.state_dict().keys() if named else ()
    buffers = [(name, buffer.detach()) for name, buffer in named.items() if name in persistent]
    return dict(sorted(buffers, key=lambda named_buffer: not named_buffer[1].is_floating_point()))


def _shown(names: Collection[str], most: int = 20) -> str:
    listed = ", ".join(list(names)[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed
