"""Local steps in fixed memory: a whole step is recorded as a CUDA graph once, and replayed K times without launches.

A step reads its number from the device, and with it which examples are in its batches, rates, weights and random
numbers: nothing of it comes from the host. All clients of the group make it. Those that are done keep their values, and
a short batch is filled: the losses of its examples are weighed. On a CPU the same step is called in place of a replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from algorithms import tree
from algorithms.batched import stacked
from algorithms.batched.batches import Joined
from algorithms.batched.choice import Choice
from algorithms.batched.contexts import Rules
from algorithms.batched.local import Steps, rates_by_step
from algorithms.batched.members import Members
from algorithms.batched.modules import CountedNumbers
from algorithms.batched.plans import Planned, completed
from algorithms.batched.strategies import Strategy
from algorithms.model_state import trainable_views
from algorithms.precision import widened

SEEN = 2
"""Groups of a shape before its step is recorded: rare shapes are not."""
MOST_GRAPHS = 4
"""Each keeps the memory of its step."""


@dataclass(frozen=True, slots=True)
class _Schedule:
    """What the steps of a group read by their number: tensors [steps, ...]."""

    rows: Tensor
    """[steps, clients, examples]."""
    rates: Tensor
    """[steps, clients]; 0 where a client is done."""
    active: Tensor | None
    """[steps, clients], bool. None: all clients make all steps."""
    weights: Tensor | None
    """[steps, clients, examples], of the losses. None: all batches are full."""
    drawn: Sequence[Tensor]
    """Random numbers for the last step of the batches, [steps, clients, examples, ...]."""

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [each for each in (self.rows, self.rates, self.active, self.weights, *self.drawn) if each is not None]


class FixedSteps:
    """The steps of groups of one shape."""

    def __init__(self, model: nn.Module, members: Members, rules: Rules, strategy: Strategy) -> None:
        """members: of the first group, with planned batches and counted numbers."""
        if not isinstance(members.batches, Planned) or not isinstance(members.numbers, CountedNumbers):
            raise TypeError("expected members with planned batches and counted numbers")
        self._planned, self._numbers = members.batches, members.numbers.copy()
        self._strategy = strategy
        # One direction for all clients is not copied for each of them, but the next group may have several.
        own = rules if rules.u is None else replace(rules, u=tree.map(torch.clone, rules.u))
        self._steps = Steps(model, own, strategy, replace(members, numbers=self._numbers))
        self._schedule = _schedule(members, self._steps)
        self._losses = torch.zeros_like(self._schedule.rates)
        self._graph: torch.cuda.CUDAGraph | None = None

    def record(self) -> None:
        """Record the step. Raises RuntimeError for one that cannot be recorded. Only on CUDA."""
        aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):  # libraries allocate their memory in a first step, which a graph must not have
            self._step()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._graph = graph

    def train(self, model: nn.Module, members: Members, rules: Rules) -> tuple[Steps, Tensor]:
        """Do what `train_together` does, for a group of the same shape. The next group overwrites the result."""
        fresh = Steps(model, rules, self._strategy, members)
        self._steps.copy_(fresh)
        for one, other in zip(self._schedule.tensors, _schedule(members, fresh).tensors, strict=True):
            one[: len(other)].copy_(other)
        if isinstance(members.numbers, CountedNumbers):
            self._numbers.copy_(members.numbers)
        model.train()
        for _ in range(members.steps[0]):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        return self._steps, self._losses[: members.steps[0]]

    def _step(self) -> None:
        schedule, planned, number = self._schedule, self._planned, self._numbers.step
        rows, rates = _at(schedule.rows, number), _at(schedule.rates, number)
        inputs, targets = planned.inputs[rows], planned.targets[rows]
        if planned.finish is not None:
            inputs, targets = completed(planned.finish, inputs, targets, [_at(it, number) for it in schedule.drawn])
        weights = None if schedule.weights is None else _at(schedule.weights, number)
        batches = Joined((inputs, targets), [rows.shape[1]] * len(rows), weights)
        kept = [tensors for tensors in (self._steps.y, self._steps.v, self._steps.buffers) if tensors]
        before = [] if schedule.active is None else [tree.map(torch.clone, tensors) for tensors in kept]
        losses = self._steps.take(batches, len(rows), rates)
        if schedule.active is not None:
            active = _at(schedule.active, number)
            losses = losses.where(active, losses.new_zeros(()))
            for tensors, values in zip(kept, before, strict=True):
                for name, tensor in tensors.items():
                    tensor.copy_(tensor.where(active.view(-1, *(1 for _ in tensor.shape[1:])), values[name]))
        self._losses.index_copy_(0, number, losses[None].to(self._losses.dtype))
        self._numbers.next_step()


class Recorded:
    """Makes the steps of groups by recorded ones where that is possible."""

    def __init__(self, choice: Choice, *, records: bool = True) -> None:
        """records: False: steps in fixed memory are called, as on a CPU."""
        self._choice, self._records = choice, records
        self._seen: Counter[object] = Counter()
        self._fixed: dict[object, FixedSteps] = {}
        self.impossible = ""
        """Why steps are not recorded; empty if they may be."""

    def __str__(self) -> str:
        if self.impossible:
            return f"no step is recorded ({self.impossible})"
        return f"steps of {len(self._fixed)} shapes are recorded"

    def train(self, model: nn.Module, members: Members, rules: Rules) -> tuple[Steps, Tensor] | None:
        """The result of `train_together`; None for steps that are not recorded."""
        self.impossible = self.impossible or self._why_not(members, rules)
        if self.impossible:
            return None
        like = next(iter(widened(trainable_views(model)).values()))
        rules = _with_factors_on_device(rules, like.new_ones(len(members.steps)))
        shape = self._shape(model, members, rules)
        self._seen[shape] += 1
        if shape not in self._fixed:
            if self._seen[shape] <= SEEN or len(self._fixed) == MOST_GRAPHS:
                return None
            fixed = FixedSteps(model, members, rules, self._choice.strategy)
            try:
                if self._records:
                    fixed.record()
            except RuntimeError as error:
                self.impossible = str(error).splitlines()[0]
                return None
            self._fixed[shape] = fixed
        return self._fixed[shape].train(model, members, rules)

    def _why_not(self, members: Members, rules: Rules) -> str:
        if not isinstance(members.batches, Planned):
            return "the batches are not those of one tensor of examples"
        if rules.ascents or rules.optimizers:
            return "the method transforms the inputs, or an optimizer of torch makes the steps"
        if not isinstance(members.numbers, CountedNumbers):
            return "the clients draw random numbers one after the other"
        if not self._choice.facts.means and _has_short_batches(members.batches, members.steps):
            return "batches have several sizes, and the loss is no mean over examples that do not influence each other"
        return ""

    def _shape(self, model: nn.Module, members: Members, rules: Rules) -> object:
        """What decides whether a recorded step fits."""
        planned, settings = members.batches, members.work.settings
        if not isinstance(planned, Planned):
            raise TypeError("expected planned batches")
        steps, clients, examples = planned.steps.rows.shape
        terms = (rules.terms.gradient, rules.terms.anchored, rules.u is None, rules.v is None)
        return (
            id(model),
            (clients, examples, _capacity(steps), planned.inputs.data_ptr(), planned.targets.data_ptr()),
            (members.steps[0] == members.steps[-1], _has_short_batches(planned, members.steps)),
            (settings.weight_decay, settings.max_gradient_norm),
            (*terms, *(isinstance(factor, Tensor) for factor in (rules.a, rules.mu, rules.gamma))),
        )


def _with_factors_on_device(rules: Rules, ones: Tensor) -> Rules:
    """The rules with factors as tensors [clients], so that a recorded step reads them. Neutral ones stay numbers."""

    def placed(factor: stacked.Factor, neutral: float) -> stacked.Factor:
        return factor if stacked.equals(factor, neutral) else ones * factor

    return replace(rules, a=placed(rules.a, 1.0), mu=placed(rules.mu, 0.0), gamma=placed(rules.gamma, 0.0))


def _has_short_batches(planned: Planned, counts: Sequence[int]) -> bool:
    width = planned.steps.rows.shape[2]
    return any(
        size != width
        for number, sizes in enumerate(planned.steps.sizes)
        for size, count in zip(sizes, counts, strict=True)
        if number < count
    )


def _capacity(steps: int) -> int:
    return 1 << (steps - 1).bit_length()


def _schedule(members: Members, steps: Steps) -> _Schedule:
    """The schedule of a group, with room for more steps than it has."""
    planned, like = members.batches, next(iter(steps.y.values()))
    if not isinstance(planned, Planned):
        raise TypeError("expected planned batches")
    rows = planned.steps.rows
    count, clients, width = rows.shape
    more = _capacity(count) - count

    def with_room(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])]) if more else tensor.clone()

    rates = [row + [0.0] * (clients - len(row)) for row in rates_by_step(members.work.settings, members.steps)]
    sizes = torch.tensor(planned.steps.sizes, device=like.device)
    weights = (torch.arange(width, device=like.device) < sizes[..., None]) / sizes.clamp(min=1)[..., None].to(
        like.dtype
    )
    return _Schedule(
        with_room(rows),
        with_room(torch.tensor(rates, dtype=like.dtype, device=like.device)),
        with_room(sizes > 0) if members.steps[0] != members.steps[-1] else None,
        with_room(weights) if _has_short_batches(planned, members.steps) else None,
        [with_room(each) for each in planned.drawn],
    )


def _at(tensor: Tensor, number: Tensor) -> Tensor:
    """tensor[number], without reading the number on the host."""
    return tensor.index_select(0, number).squeeze(0)
