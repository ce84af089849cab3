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
from algorithms.batched.stacked import Factor
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
        self.x = {name: each.unsqueeze(0) for name, each in widened(tree.map(torch.clone, views)).items()}
        self.y = stacked.repeated(widened(views), clients)
        self._u = rules.u
        self._anchor: Tensors | None = None
        if not stacked.equals(rules.mu, 0.0):
            self._prepare_proximal_term()
        self.v = None if rules.v is None else tree.map(torch.clone, rules.v)
        self.buffers = stacked.repeated({name: each.detach() for name, each in model.named_buffers()}, clients)
        replays = rules.terms.gradient.rho > 0.0 or rules.terms.anchored
        self.gradients = StackedGradients(
            strategy,
            Settings(settings, rules.terms.gradient, replays, low_dtypes(views)),
            self.buffers,
            members.numbers,
            rules.ascents,
        )
        self.optimizers: list[OptimizerSteps] = [
            each.begin(stacked.of_client(self.y, number), model) for number, each in enumerate(rules.optimizers)
        ]

    def _prepare_proximal_term(self) -> None:
        """One constant instead of two, as for a client alone: an anchor in place of x and u, or u - mu * x."""
        x, mu = tree.map(lambda x, y: x.expand_as(y), self.x, self.y), self._rule.mu
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
        factors = [factor for factor in (rule.a, rule.mu, rule.gamma) if isinstance(factor, Tensor)]
        return [*(tensor for tensors in named for tensor in (tensors or {}).values()), *factors]

    def take(self, batches: StepBatches, active: int, rate: Factor, rates: Sequence[float] = ()) -> Tensor:
        """Make the step of these batches, one for each of the first clients. Returns the losses before it.

        rate: of these clients; rates: the same as numbers, for optimizers.
        """
        rule, y = self._rule, stacked.first(self.y, active)
        g, losses = self.gradients.compute(y, batches)
        if rule.terms.anchored:
            at_x = {name: x.expand_as(y[name]) for name, x in self.x.items()}
            g = tree.subtract(g, self.gradients.recompute_at(at_x))
        if self.v is None and not self.optimizers and rule.terms.gradient.order == "paper":
            self._move(y, g, rate)
            return losses
        d = self._mixed(g, y)
        for number, (optimizer, own) in enumerate(zip(self.optimizers, rates, strict=False)):
            optimizer.step(stacked.of_client(d, number), own)
        if self.optimizers:
            return losses
        if self.v is not None:
            v = stacked.first(self.v, active)
            tree.copy_(v, stacked.add(d, v, stacked.first_of(rule.gamma, active)))
            d = v
        stacked.add_(y, d, -rate)
        return losses

    def _move(self, y: Tensors, g: Tensors, rate: Factor) -> None:
        """y <- y - eta_l * d, one term at a time, with the operations of a client alone."""
        active = len(next(iter(y.values())))
        if self._anchor is not None:
            stacked.lerp_(y, stacked.first(self._anchor, active), rate * stacked.first_of(self._rule.mu, active))
        if self._u is not None:
            stacked.add_(y, stacked.first(self._u, active), -rate)
        stacked.add_(y, g, -rate * stacked.first_of(self._rule.a, active))

    def _mixed(self, g: Tensors, y: Tensors) -> Tensors:
        """d = a * g + u + mu * (y - x); with the order "feddyn_code" clip(a * g + u - mu * x) + (wd + mu) * y."""
        active = len(next(iter(y.values())))
        a, mu = stacked.first_of(self._rule.a, active), stacked.first_of(self._rule.mu, active)
        d = g if stacked.equals(a, 1.0) else stacked.scale(g, a)
        if self._u is not None:
            d = tree.add(stacked.first(self._u, active), d)
        if self._anchor is not None:
            d = stacked.add(d, tree.subtract(y, stacked.first(self._anchor, active)), mu)
        if self._rule.terms.gradient.order == "paper":
            return d
        d = stacked.clipped(d, self._settings.max_gradient_norm)
        decay = self._settings.weight_decay + mu
        return d if stacked.equals(decay, 0.0) else stacked.add(d, y, decay)


def rates_by_step(settings: LocalSettings, steps: Sequence[int]) -> list[list[float]]:
    """The learning rates [steps][clients] of the clients that make each step."""
    even = steps[0] == steps[-1]
    active = [len(steps) if even else sum(count > step for count in steps) for step in range(steps[0])]
    if settings.schedule.constant:
        return [[settings.learning_rate] * count for count in active]
    rates = [rates_of(settings, count) for count in steps]
    return [[next(rates[number]) for number in range(count)] for count in active]
