"""A local step of many clients: gradients of all, and the local rule on tensors with a client dimension.

The clients are sorted by their number of steps, the most first. So those that still train are the first of the stack,
and a step reads and writes views of their tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from algorithms import tree
from algorithms.base import LocalSettings, Tensors
from algorithms.batched import stacked
from algorithms.batched.batches import StepBatches
from algorithms.batched.contexts import Rules
from algorithms.batched.gradients import Settings, StackedGradients
from algorithms.batched.members import Members
from algorithms.batched.strategies import Strategy
from algorithms.local import rates_of
from algorithms.model_state import trainable_views
from algorithms.optimizers.steps import OptimizerSteps
from algorithms.precision import low_dtypes, widened


class Steps:
    """Makes the local steps of a stack of clients from x."""

    def __init__(self, model: nn.Module, rules: Rules, strategy: Strategy, members: Members) -> None:
        views, clients, settings = trainable_views(model), len(members.steps), members.work.settings
        self._rule, self._settings = rules, settings
        self.x = {name: tensor.unsqueeze(0) for name, tensor in widened(tree.map(torch.clone, views)).items()}
        self.y = stacked.repeated(widened(views), clients)
        self._u = rules.u
        self._anchor: Tensors | None = None
        if rules.mu is not None:
            self._prepare_proximal_term(rules.mu)
        self.v = None if rules.v is None else tree.map(torch.clone, rules.v)
        self.buffers = stacked.repeated({name: buffer.detach() for name, buffer in model.named_buffers()}, clients)
        replays = rules.terms.gradient.rho > 0.0 or rules.terms.anchored
        self.gradients = StackedGradients(
            strategy,
            Settings(settings, rules.terms.gradient, replays, low_dtypes(views)),
            self.buffers,
            members.numbers,
            rules.ascents,
        )
        self.optimizers: list[OptimizerSteps] = [
            optimizer.begin(stacked.of_client(self.y, number), model)
            for number, optimizer in enumerate(rules.optimizers)
        ]

    def _prepare_proximal_term(self, mu: Tensor) -> None:
        """One constant instead of two, as for a client alone: an anchor in place of x and u, or u - mu * x."""
        x = tree.map(lambda x, y: x.expand_as(y), self.x, self.y)
        if self._rule.terms.gradient.order == "feddyn_code":
            self._u = stacked.scale(x, -mu) if self._u is None else stacked.add(self._u, x, -mu)
            return
        self._anchor = tree.map(torch.clone, x) if self._u is None else stacked.add(x, self._u, -1.0 / mu)
        self._u = None

    @property
    def memory(self) -> list[Tensor]:
        """All tensors with the values of a group."""
        rule = self._rule
        named = (self.x, self.y, self.v, self.buffers, self._u, self._anchor)
        factors = [factor for factor in (rule.a, rule.mu, rule.gamma) if factor is not None]
        return [*(tensor for tensors in named for tensor in (tensors or {}).values()), *factors]

    def take(self, batches: StepBatches, active: int, rate: Tensor, rates: Sequence[float] = ()) -> Tensor:
        """Make the step of these batches, one for each of the first clients. Returns the losses before it.

        rate: [active]; rates: the same as numbers, for optimizers.
        """
        rule, y = self._rule, stacked.first(self.y, active)
        g, losses = self.gradients.compute(y, batches)
        if rule.terms.anchored:
            at_x = {name: x.expand_as(y[name]) for name, x in self.x.items()}
            g = tree.subtract(g, self.gradients.recompute_at(at_x))
        a, mu, gamma = (None if factor is None else factor[:active] for factor in (rule.a, rule.mu, rule.gamma))
        if self.v is None and not self.optimizers and rule.terms.gradient.order == "paper":
            self._move(y, g, rate, rate if a is None else rate * a)
            return losses
        d = self._mixed(g if a is None else stacked.scale(g, a), y, mu)
        for number, (optimizer, own) in enumerate(zip(self.optimizers, rates, strict=False)):
            optimizer.step(stacked.of_client(d, number), own)
        if self.optimizers:
            return losses
        if self.v is not None:
            v = stacked.first(self.v, active)
            tree.copy_(v, d if gamma is None else stacked.add(d, v, gamma))
            d = v
        stacked.add_(y, d, -rate)
        return losses

    def _move(self, y: Tensors, g: Tensors, rate: Tensor, rate_of_g: Tensor) -> None:
        """y <- y - eta_l * d, one term at a time, as a client alone."""
        active = len(rate)
        if self._anchor is not None and self._rule.mu is not None:
            stacked.lerp_(y, stacked.first(self._anchor, active), rate * self._rule.mu[:active])
        if self._u is not None:
            stacked.add_(y, stacked.first(self._u, active), -rate)
        stacked.add_(y, g, -rate_of_g)

    def _mixed(self, d: Tensors, y: Tensors, mu: Tensor | None) -> Tensors:
        """d + u + mu * (y - x); with the order "feddyn_code" clip(d + u - mu * x) + (wd + mu) * y."""
        active, decay = len(next(iter(y.values()))), self._settings.weight_decay
        if self._u is not None:
            d = tree.add(stacked.first(self._u, active), d)
        if self._anchor is not None and mu is not None:
            d = stacked.add(d, tree.subtract(y, stacked.first(self._anchor, active)), mu)
        if self._rule.terms.gradient.order == "paper":
            return d
        d = stacked.clipped(d, self._settings)
        if mu is not None:
            return stacked.add(d, y, decay + mu)
        return tree.add(d, y, decay) if decay else d


def rates_by_step(settings: LocalSettings, steps: Sequence[int]) -> list[list[float]]:
    """The learning rates [steps][clients] of the clients that make each step."""
    even = steps[0] == steps[-1]
    active = [len(steps) if even else sum(count > step for count in steps) for step in range(steps[0])]
    if settings.schedule.constant:
        return [[settings.learning_rate] * count for count in active]
    rates = [rates_of(settings, count) for count in steps]
    return [[next(rates[number]) for number in range(count)] for count in active]
