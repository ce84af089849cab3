"""Local training in lockstep: step k of all clients that have one, then step k + 1.

The clients are sorted by their number of steps, the most first. So those that still train are the first of the stack,
and a step reads and writes views of their tensors: the others are neither computed nor masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from algorithms import tree
from algorithms.base import LocalRule, Tensors
from algorithms.batched import stacked
from algorithms.batched.batches import check_rules, finished
from algorithms.batched.gradients import Settings, StackedGradients
from algorithms.batched.modules import RandomStream
from algorithms.batched.stacked import Factor
from algorithms.batched.strategies import Strategy
from algorithms.client import LocalData, Work
from algorithms.local import LocalResult, epoch_losses, rates_of
from algorithms.model_state import read_buffers, trainable_views
from algorithms.precision import low_dtypes, rounded_like, widened


@dataclass(frozen=True, slots=True)
class Member:
    """A client of a group."""

    data: LocalData
    work: Work
    stream: RandomStream
    """Its random numbers, from their state at the beginning of the work."""


def train_together(
    model: nn.Module, members: Sequence[Member], rules: Sequence[LocalRule], strategy: Strategy
) -> list[LocalResult]:
    """Train all members from the model's current values. The model itself is not changed.

    members: sorted by their numbers of steps, the most first. rules: one for each.

    Raises:
        NotBatched: the rules differ in their terms, or a batch is not made of tensors.
        ValueError: a client has fewer batches than steps, or a tensor of a rule has another layout than the model.
    """
    check_rules(list(rules))
    steps = _Steps(model, members, rules, strategy)
    batches = [iter(member.data.batches) for member in members]
    counts, losses = [member.data.steps for member in members], []
    model.train()
    for step in range(counts[0]):
        active = sum(count > step for count in counts)
        raw = [_next(batches[i], members[i], step) for i in range(active)]
        losses.append(steps.take(finished(raw, [member.data.finish for member in members[:active]])))
    return [steps.result(i, _sums(losses, i, counts[i])) for i in range(len(members))]


def _next(batches: object, member: Member, step: int) -> object:
    with member.stream.use():
        batch = next(batches, None)  # type: ignore[call-overload]  # an iterator of batches of any type
    if batch is None:
        raise ValueError(f"expected {member.data.steps} batches for the local steps, got {step}")
    return batch


def _sums(losses: Sequence[Tensor], client: int, steps: int) -> Tensor:
    """The sums of a client's losses before each step and after the last one, in float64."""
    own = torch.stack([each[client] for each in losses[:steps]]).double()
    return torch.cat([own.new_zeros(1), own.cumsum(0)])


class _Steps:
    """Makes the local steps of a stack of clients from x."""

    def __init__(
        self, model: nn.Module, members: Sequence[Member], rules: Sequence[LocalRule], strategy: Strategy
    ) -> None:
        views, rule, clients = trainable_views(model), rules[0], len(members)
        self._model, self._members, self._rule = views, members, rule
        self._settings = members[0].work.settings
        self._rates = [rates_of(member.work.settings, member.data.steps) for member in members]
        self._x = {name: each.unsqueeze(0) for name, each in widened(tree.map(torch.clone, views)).items()}
        self._y = stacked.repeated(widened(views), clients)
        like = next(iter(self._y.values()))
        self._a, self._mu, self._gamma = (
            stacked.factor_of([getattr(rule, name) for rule in rules], like) for name in ("a", "mu", "gamma")
        )
        x = widened(views)
        self._u = _stacked_direction(x, [rule.u for rule in rules], "u")
        self._anchor: Tensors | None = None
        if not stacked.equals(self._mu, 0.0):
            self._prepare_proximal_term()
        v = _stacked_direction(x, [rule.v for rule in rules], "v")
        self._v = None if v is None else tree.map(torch.clone, v)
        self._kept_buffers = list(read_buffers(model))
        self._buffers = stacked.repeated({name: each.detach() for name, each in model.named_buffers()}, clients)
        self._gradients = StackedGradients(
            strategy,
            Settings(self._settings, rule.gradient, rule.gradient.rho > 0.0 or rule.anchored, low_dtypes(views)),
            self._buffers,
            [member.stream for member in members],
            [rule.ascent for rule in rules],
        )
        self._optimizers = [
            each.optimizer.begin(stacked.of_client(self._y, number), model)
            for number, each in enumerate(rules)
            if each.optimizer is not None
        ]

    def _prepare_proximal_term(self) -> None:
        """One constant instead of two, as for a client alone: an anchor in place of x and u, or u - mu * x."""
        x = tree.map(lambda x, y: x.expand_as(y), self._x, self._y)
        if self._rule.gradient.order == "feddyn_code":
            self._u = stacked.scale(x, -self._mu) if self._u is None else stacked.add(self._u, x, -self._mu)
            return
        self._anchor = x if self._u is None else stacked.add(x, self._u, -1.0 / self._mu)
        self._u = None

    def take(self, batches: Sequence[object]) -> Tensor:
        """Make the step of these batches, one for each of the first clients. Returns the losses before it."""
        active, rule = len(batches), self._rule
        y = stacked.first(self._y, active)
        g, losses = self._gradients.compute(y, batches)
        if rule.anchored:
            g = tree.subtract(
                g, self._gradients.recompute_at({name: x.expand_as(y[name]) for name, x in self._x.items()})
            )
        rates = [next(rates) for rates in self._rates[:active]]
        if self._v is None and not self._optimizers and rule.gradient.order == "paper":
            self._move(y, g, stacked.factor_of(rates, losses))
            return losses
        d = self._mixed(g, y)
        for number, (optimizer, rate) in enumerate(zip(self._optimizers, rates, strict=False)):
            optimizer.step(stacked.of_client(d, number), rate)
        if self._optimizers:
            return losses
        if self._v is not None:
            v = stacked.first(self._v, active)
            tree.copy_(v, stacked.add(d, v, stacked.first_of(self._gamma, active)))
            d = v
        stacked.add_(y, d, -stacked.factor_of(rates, losses))
        return losses

    def _move(self, y: Tensors, g: Tensors, rate: Factor) -> None:
        """y <- y - eta_l * d, one term at a time, with the operations of a client alone."""
        active = len(next(iter(y.values())))
        if self._anchor is not None:
            stacked.lerp_(y, stacked.first(self._anchor, active), rate * stacked.first_of(self._mu, active))
        if self._u is not None:
            stacked.add_(y, stacked.first(self._u, active), -rate)
        stacked.add_(y, g, -rate * stacked.first_of(self._a, active))

    def _mixed(self, g: Tensors, y: Tensors) -> Tensors:
        """d = a * g + u + mu * (y - x); with the order "feddyn_code" clip(a * g + u - mu * x) + (wd + mu) * y."""
        active = len(next(iter(y.values())))
        a, mu = stacked.first_of(self._a, active), stacked.first_of(self._mu, active)
        d = g if stacked.equals(a, 1.0) else stacked.scale(g, a)
        if self._u is not None:
            d = tree.add(stacked.first(self._u, active), d)
        if self._anchor is not None:
            d = stacked.add(d, tree.subtract(y, stacked.first(self._anchor, active)), mu)
        if self._rule.gradient.order == "paper":
            return d
        d = stacked.clipped(d, self._settings.max_gradient_norm)
        decay = self._settings.weight_decay + mu
        return d if stacked.equals(decay, 0.0) else stacked.add(d, y, decay)

    def result(self, number: int, sums: Tensor) -> LocalResult:
        """The result of one client. sums: of its losses, before each step and after the last one."""
        data, own = self._members[number].data, stacked.of_client(self._y, number)
        x = {name: tensor[0] for name, tensor in self._x.items()}
        ends = [*range(0, data.steps, data.epoch_steps or data.steps), data.steps]
        return LocalResult(
            rounded_like(self._model, tree.subtract(own, x)),
            {name: self._buffers[name][number].clone() for name in self._kept_buffers},
            data.steps,
            sums[-1].item() / data.steps,
            None
            if self._v is None
            else tree.map(torch.clone, rounded_like(self._model, stacked.of_client(self._v, number))),
            dict(self._gradients.ascended[number]) if self._rule.ascent else {},
            self._optimizers[number].memory() if self._optimizers else {},
            epochs=epoch_losses([sums[end] for end in ends], data.epoch_steps, data.steps),
        )


def _stacked_direction(x: Tensors, parts: Sequence[Tensors | None], name: str) -> Tensors | None:
    """A tensor of the clients' rules with the layout of x, on its device; None without one."""
    moved = []
    for part in parts:
        if part is None:
            return None
        wide = widened(part)
        tree.check_layout(x, wide, f"direction {name} of the local rule")
        moved.append({each: wide[each].to(tensor.device) for each, tensor in x.items()})
    return stacked.stack(moved)
