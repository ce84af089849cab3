"""Local training: K_i steps of one rule, the same for every method."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from algorithms import tree
from algorithms.base import LocalRule, Tensors
from algorithms.model_state import read_state, trainable_views


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """How the steps of one round are made, whatever the method."""

    learning_rate: float
    """eta_l(t), over 0; the decay by round is already in it."""
    weight_decay: float = 0.0
    """wd: wd * y becomes part of the gradient g before the method's rule. 0: none."""
    max_gradient_norm: float = 0.0
    """C: global L2 norm that the data gradient is clipped to, before the decay. 0: no clipping."""

    def __post_init__(self) -> None:
        if not 0.0 < self.learning_rate < math.inf:
            raise ValueError(f"expected a learning rate over 0, got {self.learning_rate}")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ValueError(f"expected a weight decay of 0 or more, got {self.weight_decay}")
        if not 0.0 <= self.max_gradient_norm < math.inf:
            raise ValueError(f"expected a gradient norm of 0 (no clipping) or more, got {self.max_gradient_norm}")


@dataclass(frozen=True, slots=True)
class LocalResult:
    """What one client's training gave; tensors are on the model's device."""

    delta: Tensors
    """delta_i = y_final - x of the trainable parameters: NEW minus OLD."""
    buffers: Tensors
    """Final values of the model's buffers."""
    steps: int
    """K_i."""
    loss: float
    """Mean of the steps' losses, each before its step."""


def train_locally(  # noqa: PLR0913, PLR0917 - the loop and all that it depends on
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    rule: LocalRule,
    settings: LocalSettings,
    *,
    on_step: Callable[[int], object] | None = None,
) -> LocalResult:
    """Train `model` in place from the values it has, one step for each batch.

    Args:
        model: any module, of any floating dtype, on any device; left in training mode.
        batches: (inputs, targets); moved to the model's device if they are elsewhere.
        loss: mean loss of a batch from (model(inputs), targets), of shape [].
        rule: the method's local rule; `u` may be on another device.
        settings: learning rate, weight decay, clipping.
        on_step: called after each step with its 0-based number; what it raises ends the training.

    Raises:
        ValueError: there was no batch, or `rule.u` is not laid out as the trainable parameters.
    """
    y = trainable_views(model)
    x = tree.map(torch.clone, y)
    rule = _prepared(rule, x)
    device = next(iter(y.values())).device
    total, steps = torch.zeros((), device=device), 0

    model.train()
    for inputs, targets in batches:
        value = loss(model(inputs.to(device)), targets.to(device))
        model.zero_grad()
        value.backward()
        g = _gradient(model)
        if settings.max_gradient_norm:
            g = _clipped(g, settings.max_gradient_norm)
        if settings.weight_decay:
            g = tree.add(g, y, settings.weight_decay)
        d = _mixed(g, rule, y, x)
        tree.add_(y, d, -settings.learning_rate)

        total = total + value.detach()  # stays on the device: reading it here would wait for the GPU
        steps += 1
        if on_step is not None:
            on_step(steps - 1)
    model.zero_grad()

    if not steps:
        raise ValueError("expected at least one batch to train on, got none; does this client hold any examples?")
    return LocalResult(tree.subtract(y, x), read_state(model).buffers, steps, loss=total.item() / steps)


def _prepared(rule: LocalRule, x: Tensors) -> LocalRule:
    """The rule with `u` checked and brought to the parameters' device, once a round."""
    if rule.u is None:
        return rule
    tree.check_layout(x, rule.u, "direction u of the local rule")
    return replace(rule, u=tree.map(lambda u, like: u.to(like.device), rule.u, x))


def _gradient(model: nn.Module) -> Tensors:
    """Gradients of the trainable parameters, zero for one that the loss did not reach.

    They are not to be written into: autograd may let two parameters share the memory of one gradient.
    """
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _clipped(g: Tensors, limit: float) -> Tensors:
    """g * min(1, C / (||g|| + 1e-6)), one norm over all parameters, without waiting for it."""
    return tree.scale(g, (limit / (tree.norm(g) + 1e-6)).clamp(max=1.0))


def _mixed(g: Tensors, rule: LocalRule, y: Tensors, x: Tensors) -> Tensors:
    """d = a * g + u + mu * (y - x). A neutral part is skipped, so that it costs and changes nothing."""
    d = g
    if rule.u is not None:
        d = tree.add(rule.u, g, rule.a)
    elif rule.a != 1.0:
        d = tree.scale(g, rule.a)
    if rule.mu != 0.0:
        d = tree.add(d, tree.subtract(y, x), rule.mu)
    return d
