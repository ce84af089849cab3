"""Local training: K_i steps of one rule, the same for every method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from algorithms import tree
from algorithms.base import LocalRule, LocalSettings, Tensors
from algorithms.gradients import Batches, BatchGradients, Loss, clipped
from algorithms.model_state import read_state, trainable_views


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
    v: Tensors | None = None
    """Final local heavy ball, of a rule that has one."""
    ascent: Tensors = field(default_factory=dict)
    """Final parameters of the rule's map of the inputs, if it has one."""


def train_locally(  # noqa: PLR0913, PLR0917 - the loop and all that it depends on
    model: nn.Module,
    batches: Batches,
    loss: Loss,
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
        rule: the method's local rule; its tensors may be on another device.
        settings: learning rate, weight decay, clipping.
        on_step: called after each step with its 0-based number; what it raises ends the training.

    Raises:
        ValueError: there was no batch, or `rule.u` is not laid out as the trainable parameters.
    """
    y = trainable_views(model)
    x = tree.map(torch.clone, y)
    rule = _prepared(rule, x)
    gradients = BatchGradients(model, loss, settings, rule)
    v, total, steps = rule.v, torch.zeros((), device=next(iter(y.values())).device), 0

    model.train()
    for inputs, targets in batches:
        value, g = gradients.take(inputs, targets)
        if rule.anchored:
            g = tree.subtract(g, gradients.again_at(x))
        d = _mixed(g, rule, y, x) if rule.gradient.order == "paper" else _mixed_then_shaped(g, rule, y, settings)
        if v is not None:
            d = v = tree.accumulate(v, rule.gamma, d)
        tree.add_(y, d, -settings.learning_rate)

        total = total + value  # stays on the device: reading it here would wait for the GPU
        steps += 1
        if on_step is not None:
            on_step(steps - 1)
    model.zero_grad()

    if not steps:
        raise ValueError("expected at least one batch to train on, got none; does this client hold any examples?")
    delta = tree.subtract(y, x)
    return LocalResult(delta, read_state(model).buffers, steps, total.item() / steps, v, gradients.ascended)


def _prepared(rule: LocalRule, x: Tensors) -> LocalRule:
    """The rule with its tensors checked and brought to the parameters' device, once a round."""
    brought: dict[str, Tensors] = {}
    for name, tensors in (("u", rule.u), ("v", rule.v)):
        if tensors is not None:
            tree.check_layout(x, tensors, f"direction {name} of the local rule")
            brought[name] = tree.map(lambda tensor, like: tensor.to(like.device), tensors, x)
    rule = replace(rule, u=brought.get("u"), v=brought.get("v"))
    if rule.gradient.order == "feddyn_code" and rule.mu:
        rule = replace(rule, u=tree.scale(x, -rule.mu) if rule.u is None else tree.add(rule.u, x, -rule.mu))
    return rule


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


def _mixed_then_shaped(g: Tensors, rule: LocalRule, y: Tensors, settings: LocalSettings) -> Tensors:
    """d = clip(a * g + u - mu * x) + (wd + mu) * y: there the optimizer adds mu * y together with the decay.

    `_prepared` has put - mu * x into u.
    """
    d = clipped(_mixed(g, replace(rule, mu=0.0), y, y), settings)
    decay = settings.weight_decay + rule.mu
    return tree.add(d, y, decay) if decay else d
