"""Local training: K_i steps of one rule, the same for every method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from algorithms import tree
from algorithms.base import LocalRule, LocalSettings, Tensors
from algorithms.gradients import Batches, BatchGradients, Loss, clipped
from algorithms.model_state import read_buffers, trainable_views


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
    x: Tensors | None = None,
    on_step: Callable[[int], object] | None = None,
) -> LocalResult:
    """Train `model` in place from the values it has, one step for each batch.

    Args:
        model: any module, of any floating dtype, on any device; left in training mode.
        batches: (inputs, targets); moved to the model's device if they are elsewhere.
        loss: mean loss of a batch from (model(inputs), targets), of shape [].
        rule: the method's local rule; its tensors may be on another device.
        settings: learning rate, weight decay, clipping.
        x: the values that the model has, where the caller keeps them anyway; None: they are copied.
        on_step: called after each step with its 0-based number; what it raises ends the training.

    Raises:
        ValueError: there was no batch, or `rule.u` is not laid out as the trainable parameters.
    """
    y = trainable_views(model)
    x = _start(y, x, rule)
    step = _Step(model, loss, settings, _prepared(rule, x), x)
    total, steps = torch.zeros((), device=next(iter(y.values())).device), 0

    model.train()
    for inputs, targets in batches:
        # The sum stays on the device: reading it here would wait for the GPU.
        total = total + step.take(inputs, targets)
        steps += 1
        if on_step is not None:
            on_step(steps - 1)
    model.zero_grad()

    if not steps:
        raise ValueError("expected at least one batch to train on, got none; does this client hold any examples?")
    delta = tree.subtract(y, x)  # in the memory that the gradients have left
    return LocalResult(delta, read_buffers(model), steps, total.item() / steps, step.v, step.ascended)


class _Step:
    """One step after the other from x. What only lives within a step is written where that of the last one stood."""

    def __init__(self, model: nn.Module, loss: Loss, settings: LocalSettings, rule: LocalRule, x: Tensors) -> None:  # noqa: PLR0913, PLR0917
        self._gradients = BatchGradients(model, loss, settings, rule)
        self._settings, self._rule, self._x = settings, rule, x
        self._y, self._u, self._anchor = trainable_views(model), rule.u, None
        self._for_g, self._for_d, self._for_v = tree.spare(x), tree.spare(x), tree.spare(x)
        self.v = rule.v
        if rule.gradient.order == "paper" and rule.mu:
            # One constant for two: u + mu * (y - x) = mu * (y - (x - u / mu)), and with u = 0 that is exact.
            self._u, self._anchor = None, x if rule.u is None else tree.add(x, rule.u, -1.0 / rule.mu)

    @property
    def ascended(self) -> Tensors:
        """Parameters of the rule's map of the inputs."""
        return self._gradients.ascended

    def take(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Move the model by one mini-batch; its loss before."""
        loss, g = self._gradients.take(inputs, targets)
        if self._rule.anchored:
            g = tree.subtract(g, self._gradients.again_at(self._x), self._for_g)
        rate, rule = self._settings.learning_rate, self._rule
        if self.v is None and rule.gradient.order == "paper":
            self._move(g)
            return loss
        d = self._mixed(g) if rule.gradient.order == "paper" else self._mixed_then_shaped(g)
        if self.v is not None:
            d = self.v = tree.accumulate(self.v, rule.gamma, d, self._for_v)
        tree.add_(self._y, d, -rate)
        return loss

    def _move(self, g: Tensors) -> None:
        """y <- y - eta_l * d, part by part, which takes fewer passes; a neutral part costs and changes nothing."""
        rate, rule = self._settings.learning_rate, self._rule
        if self._anchor is not None:
            tree.lerp_(self._y, self._anchor, rate * rule.mu)
        if self._u is not None:
            tree.add_(self._y, self._u, -rate)
        tree.add_(self._y, g, -rate * rule.a)

    def _mixed(self, g: Tensors) -> Tensors:
        """d = a * g + u + mu * (y - x), neutral parts skipped."""
        if self._u is not None:
            return tree.add(self._u, g, self._rule.a, self._for_d)
        if self._rule.a != 1.0:
            g = tree.scale(g, self._rule.a, self._for_g)
        if self._anchor is None:
            return g
        away = tree.subtract(self._y, self._anchor, self._for_d)
        return tree.add(g, away, self._rule.mu, self._for_d)

    def _mixed_then_shaped(self, g: Tensors) -> Tensors:
        """d = clip(a * g + u - mu * x) + (wd + mu) * y: there the optimizer adds mu * y together with the decay.

        `_prepared` has put - mu * x into u.
        """
        d = clipped(self._mixed(g), self._settings, self._for_d)
        decay = self._settings.weight_decay + self._rule.mu
        return tree.add(d, self._y, decay, self._for_d) if decay else d


def _start(y: Tensors, kept: Tensors | None, rule: LocalRule) -> Tensors:
    """x, which stays as it is while y moves. A model that is to compute at x gets it in memory of torch's own."""
    if kept is None or rule.anchored:
        return tree.map(torch.clone, y)
    tree.check_layout(y, kept, "x")
    return tree.map(_beside, y, kept)


def _prepared(rule: LocalRule, x: Tensors) -> LocalRule:
    """The rule with its tensors checked and brought to the parameters' device, once a round."""
    brought: dict[str, Tensors] = {}
    for name, tensors in (("u", rule.u), ("v", rule.v)):
        if tensors is not None:
            tree.check_layout(x, tensors, f"direction {name} of the local rule")
            brought[name] = tree.map(_beside, x, tensors)
    rule = replace(rule, u=brought.get("u"), v=brought.get("v"))
    if rule.gradient.order == "feddyn_code" and rule.mu:
        rule = replace(rule, u=tree.scale(x, -rule.mu) if rule.u is None else tree.add(rule.u, x, -rule.mu))
    return rule


def _beside(like: Tensor, tensor: Tensor) -> Tensor:
    """The tensor on the parameter's device and in its order of axes, which torch's kernels need to be fast."""
    tensor = tensor.to(like.device)
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)
