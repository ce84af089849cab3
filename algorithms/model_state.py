"""Reads and writes a torch model as named tensors: trainable parameters, buffers and frozen parameters."""

from __future__ import annotations

from dataclasses import dataclass

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
    """The other parameters: sent to a client once, never back."""


def read_state(model: nn.Module) -> ModelState:
    """Copies of the model's values, on its device. A parameter or buffer that is shared appears once."""
    views = state_views(model)
    return ModelState(*(tree.map(torch.clone, part) for part in (views.trainable, views.buffers, views.frozen)))


def state_views(model: nn.Module) -> ModelState:
    """Views of the model's values outside autograd. They share its memory."""
    parameters = dict(model.named_parameters())
    trainable = {name: each.detach() for name, each in parameters.items() if each.requires_grad}
    frozen = {name: each.detach() for name, each in parameters.items() if not each.requires_grad}
    return ModelState(trainable, _buffers(model), frozen)


def read_buffers(model: nn.Module) -> Tensors:
    """Copies of the model's persistent buffers, on its device."""
    return tree.map(torch.clone, _buffers(model))


def tied_names(model: nn.Module) -> dict[str, str]:
    """The further names of shared parameters and persistent buffers in the state_dict -> the name in `ModelState`."""
    first = {id(each): name for name, each in [*model.named_parameters(), *model.named_buffers()]}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {name: first[id(each)] for name, each in every if first[id(each)] != name}
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


def trainable_views(model: nn.Module) -> Tensors:
    """Views of the trainable parameters outside autograd. Writing into a view changes the model."""
    return tree.map(torch.detach, trainable_parameters(model))


def trainable_parameters(model: nn.Module) -> Tensors:
    """The trainable parameters themselves, which hold autograd's gradients."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _buffers(model: nn.Module) -> Tensors:
    named = dict(model.named_buffers())
    # Only the state dict shows which buffers are persistent.
    persistent = model.state_dict().keys() if named else ()
    buffers = [(name, buffer.detach()) for name, buffer in named.items() if name in persistent]
    return dict(sorted(buffers, key=lambda item: not item[1].is_floating_point()))
