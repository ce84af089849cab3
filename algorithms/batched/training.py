"""The local steps of groups: recorded once and played where that is possible, else made one operation after the other.

A recorded step works in fixed memory. It reads its number from the device, and with it which examples are in its
batches, rates, weights and random numbers: nothing of it comes from the host. All clients of the group make it. Those
that are done keep their values, and a short batch is filled: the losses of its examples are weighed. Before a shape is
recorded, and where it is rare, the same step is called, so no bit depends on the recording.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from algorithms import tree
from algorithms.batched.batches import Planned, StepBatches, completed
from algorithms.batched.choice import Facts
from algorithms.batched.contexts import Rules
from algorithms.batched.local import Steps
from algorithms.batched.members import Members
from algorithms.batched.modules import OwnNumbers
from algorithms.batched.recording import NotRecorded, Recorder, Step
from algorithms.batched.schedules import Group, at, has_short_batches, rates_of_group, schedule_of
from algorithms.batched.strategies import Strategy
from algorithms.model_state import trainable_views
from algorithms.precision import widened

SEEN = {"cpu": 2, "cuda": 0}
"""Groups of a shape before its step is recorded. On CUDA a recording takes as long as two steps that are called."""
MOST_RECORDED = {"cpu": 4, "cuda": 32}
"""Shapes, by device. On a CPU a recording takes a second or two. On CUDA drawn cohorts have any size."""
SHORT_S = 0.003
"""Longer steps are not recorded on a CPU: next to none of their time is Python."""


class _FixedSteps:
    """The steps of groups of one shape."""

    def __init__(self, model: nn.Module, group: Group, strategy: Strategy) -> None:
        """group: the first one, whose steps may be made at once."""
        rules, self._planned, self._strategy = group.rules, group.planned, strategy
        self._numbers = group.members.numbers.copy()
        # One direction for all clients is not copied for each of them, but the next group may have several.
        own = rules if rules.u is None else replace(rules, u=tree.map(torch.clone, rules.u))
        self._steps = Steps(model, own, strategy, replace(group.members, numbers=self._numbers))
        self._schedule = schedule_of(group)
        self._losses = group.ones.new_zeros(self._schedule.rates.shape)
        self._play: Step | None = None
        """None: the step is called. Kept here, its method would keep this object until Python searches for cycles."""

    @property
    def _memory(self) -> list[Tensor]:
        """All that changes between two steps, or between two groups."""
        return [*self._steps.memory, *self._schedule.tensors, *self._numbers.tensors, self._losses]

    def record(self, recorder: Recorder) -> None:
        """Record the step, which changes the values. Raises NotRecorded, and OutOfMemoryError."""
        self._play = recorder.record(self._step, self._memory)

    def load(self, model: nn.Module, group: Group) -> None:
        """Take the values of another group of the shape."""
        fresh = Steps(model, group.rules, self._strategy, group.members)
        values = [*fresh.memory, *schedule_of(group).tensors, *group.members.numbers.tensors]
        for mine, other in zip(self._memory, values, strict=False):  # the losses are results
            mine.copy_(other)

    def train(self, count: int) -> tuple[Steps, Tensor]:
        """Make so many steps; see `Training.train`. The next group overwrites the result."""
        play = self._play or self._step
        for _ in range(count):
            play()
        return self._steps, self._losses[:count]

    def _step(self) -> None:
        schedule, planned, number = self._schedule, self._planned, self._numbers.step
        rows, rates = at(schedule.rows, number), at(schedule.rates, number)
        inputs, targets = planned.inputs[rows], planned.targets[rows]
        if planned.finish is not None:
            inputs, targets = completed(planned.finish, inputs, targets, [at(it, number) for it in schedule.drawn])
        weights = None if schedule.weights is None else at(schedule.weights, number)
        batches = StepBatches((inputs, targets), [rows.shape[1]] * len(rows), weights)
        kept = [tensors for tensors in (self._steps.y, self._steps.v, self._steps.buffers) if tensors]
        before = [] if schedule.active is None else [tree.map(torch.clone, tensors) for tensors in kept]
        losses = self._steps.take(batches, len(rows), rates)
        if schedule.active is not None:
            active = at(schedule.active, number)
            losses = losses.where(active, losses.new_zeros(()))
            for tensors, values in zip(kept, before, strict=True):
                for name, tensor in tensors.items():
                    tensor.copy_(tensor.where(active.view(-1, *(1 for _ in tensor.shape[1:])), values[name]))
        self._losses.index_copy_(0, number, losses[None].to(self._losses.dtype))
        self._numbers.next_step()


class Training:
    """Makes the local steps of a run's groups."""

    def __init__(self, strategy: Strategy, facts: Facts, clock: Callable[[], float], *, masks: bool = False) -> None:
        """clock: seconds of this thread's work.

        masks: groups with fewer steps or examples of some clients have fixed memory too, which CUDA needs.

        It costs the arithmetic of all clients in all steps. A CPU computes only what is needed.
        """
        self.strategy, self._facts, self._clock, self._masks = strategy, facts, clock, masks
        self._seen: Counter[object] = Counter()
        self._recorded: dict[object, _FixedSteps] = {}
        self._recorder: Recorder | None = None
        self._shortest = math.inf
        self.client_bytes = 0
        """The largest memory of a recorded step on CUDA, for each client of its group; 0 before the first."""
        self._never = self._not_now = ""
        """Why no step is recorded, and why those of some group are not."""

    def __str__(self) -> str:
        shapes = f"steps of {len(self._recorded)} shapes are recorded" if self._recorded else "no step is recorded"
        why_not = self._never or self._not_now
        return f"{shapes} ({why_not})" if why_not else shapes

    def train(self, model: nn.Module, members: Members, rules: Rules) -> tuple[Steps, Tensor]:
        """Train all members from the model's current values. The model itself is not changed.

        Returns the steps with their final tensors, valid until the next group, and the losses before each step,
        [steps, clients]; 0 after a client's last step.

        Raises:
            NotBatched: the clients' batches of a step are not alike.
            OutOfMemoryError: there is no memory for the group.
            ValueError: a client has fewer batches than steps, or a tensor of a rule has another layout than the model.
        """
        planned, short = members.batches, has_short_batches(members)
        if why := self._not_fixed(members, rules, short=short):
            self._not_now = why
        if why or not isinstance(planned, Planned):
            return _called(model, members, rules, self.strategy)
        model.train()
        ones = next(iter(widened(trainable_views(model)).values())).new_ones(len(members.steps))
        group = Group(members, planned, rules, ones, short)
        shape = group.shape(model)
        fixed = self._recorded.get(shape)
        if fixed is None:
            fixed = _FixedSteps(model, group, self.strategy)
            if self._pays(shape, ones.device):
                self._record(shape, fixed, ones.device, len(members.steps))
                fixed.load(model, group)
        else:
            fixed.load(model, group)
        before = self._clock()
        found = fixed.train(members.steps[0])
        self._shortest = min(self._shortest, (self._clock() - before) / members.steps[0])
        return found

    def forget(self) -> None:
        """Free the memory of all recorded steps."""
        self._recorded.clear()
        self._recorder = None

    def _pays(self, shape: object, device: torch.device) -> bool:
        self._seen[shape] += 1
        if self._seen[shape] <= SEEN[device.type] or len(self._recorded) == MOST_RECORDED[device.type] or self._never:
            return False
        if device.type == "cpu" and self._shortest > SHORT_S:
            self._never = f"one takes {1000 * self._shortest:.0f} ms"
        return not self._never

    def _record(self, shape: object, fixed: _FixedSteps, device: torch.device, clients: int) -> None:
        before, self._recorder = reserved_bytes(device), self._recorder or Recorder(device)
        try:
            fixed.record(self._recorder)
        except NotRecorded as error:
            self._never = str(error)
            return
        self._recorded[shape] = fixed
        self.client_bytes = max(self.client_bytes, -(-(reserved_bytes(device) - before) // clients))

    def _not_fixed(self, members: Members, rules: Rules, *, short: bool) -> str:
        """Why the steps of a group cannot be made in fixed memory; empty if they can."""
        planned = members.batches
        if not isinstance(planned, Planned) or not planned.stays:
            return "the batches are not those of one tensor of examples"
        if rules.ascents or rules.optimizers:
            return "the method transforms the inputs, or an optimizer of torch makes the steps"
        if isinstance(members.numbers, OwnNumbers) and (self._facts.draws or planned.draw is not None):
            return "the clients draw random numbers one after the other"
        if not self._masks and (short or members.steps[0] != members.steps[-1]):
            return "some clients have fewer steps or examples than others"
        if short and not self._facts.means:
            return "batches have several sizes, and the loss is no mean over examples that do not influence each other"
        return ""


def reserved_bytes(device: torch.device) -> int:
    """Memory that torch uses on a GPU, that of recorded steps included; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()  # else the next recording would, in the middle of a measurement
    return torch.cuda.memory_reserved(device)


def _called(model: nn.Module, members: Members, rules: Rules, strategy: Strategy) -> tuple[Steps, Tensor]:
    """Step k of all clients that have one, then step k + 1: each step works on views of the first clients' tensors."""
    steps = Steps(model, rules, strategy, members)
    losses: list[Tensor] = []
    rates, placed = rates_of_group(members, next(iter(steps.y.values())))
    model.train()
    for number, own in enumerate(rates):
        active = len(own)
        batches = members.batches.at(number, active)
        found = steps.take(batches, active, placed[number, :active], own)
        members.numbers.next_step()
        losses.append(torch.cat([found, found.new_zeros(len(members.steps) - active)]))
    return steps, torch.stack(losses)
