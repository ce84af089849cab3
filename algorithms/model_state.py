"""Between a torch model and named tensors: what is trained, what is averaged, what stays as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from algorithms import tree
from algorithms.base import Tensors


@dataclass(frozen=True, slots=True)
class ModelState:
    """All values of a model, by the names that `named_parameters` and `named_buffers` give them."""

    trainable: Tensors
    """Parameters with requires_grad: the x of the formulas, and the only tensors that a delta has."""
    buffers: Tensors
    """Persistent buffers, floating ones first, then integers: averaged plainly or taken at their maximum."""
    frozen: Tensors
    """The other parameters: sent down once, never up."""


def read_state(model: nn.Module) -> ModelState:
    """Copies of the model's values, on its device. A parameter or buffer that is shared appears once."""
    views = state_views(model)
    return ModelState(*(tree.map(torch.clone, part) for part in (views.trainable, views.buffers, views.frozen)))


def state_views(model: nn.Module) -> ModelState:
    """The model's values outside autograd, sharing their memory, as `trainable_views` does."""
    parameters = dict(model.named_parameters())
    trainable = {name: each.detach() for name, each in parameters.items() if each.requires_grad}
    frozen = {name: each.detach() for name, each in parameters.items() if not each.requires_grad}
    return ModelState(trainable, _buffers(model), frozen)


def read_buffers(model: nn.Module) -> Tensors:
    """Copies of the model's persistent buffers, on its device."""
    return tree.map(torch.clone, _buffers(model))


def load_state(model: nn.Module, state: ModelState) -> None:
    """Copy all of `state` into the model, whatever device each is on.

    Raises:
        ValueError: a name is missing or unknown, or a shape or dtype is not the model's; nothing was copied then.
    """
    fill(state_views(model), state)


def fill(views: ModelState, state: ModelState) -> None:
    """`load_state` for a model of which these are the views."""
    parts = (
        ("trainable parameters", views.trainable, state.trainable),
        ("buffers", views.buffers, state.buffers),
        ("frozen parameters", views.frozen, state.frozen),
    )
    for what, current, given in parts:
        tree.check_layout(current, given, what)
    for _, current, given in parts:
        for name, tensor in current.items():
            tensor.copy_(given[name])


def trainable_views(model: nn.Module) -> Tensors:
    """The trainable parameters outside autograd, sharing their memory: write into a view and the model has changed."""
    return tree.map(torch.detach, trainable_parameters(model))


def trainable_parameters(model: nn.Module) -> Tensors:
    """The trainable parameters themselves, on which autograd leaves gradients."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _buffers(model: nn.Module) -> Tensors:
    named = dict(model.named_buffers())
    # Only a state dict tells which buffers are persistent.
    persistent = model.state_dict().keys() if named else ()
    buffers = [(name, buffer.detach()) for name, buffer in named.items() if name in persistent]
    return dict(sorted(buffers, key=lambda item: not item[1].is_floating_point()))
