"""What the fixed memory of a group's steps needs to know: the group, and all that its steps read by their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from algorithms import tree
from algorithms.batched.batches import Planned
from algorithms.batched.contexts import Rules
from algorithms.batched.local import rates_by_step
from algorithms.batched.members import Members


@dataclass(frozen=True, slots=True)
class Schedule:
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
        return [
            tensor for tensor in (self.rows, self.rates, self.active, self.weights, *self.drawn) if tensor is not None
        ]


@dataclass(frozen=True, slots=True)
class Group:
    """A group whose steps can be made in fixed memory."""

    members: Members
    planned: Planned
    rules: Rules
    ones: Tensor
    """[clients], of the dtype that y has."""
    short: bool
    """Some batches are short."""

    @property
    def uneven(self) -> bool:
        """Some clients have fewer steps."""
        return self.members.steps[0] != self.members.steps[-1]

    def shape(self, model: nn.Module) -> object:
        """What decides whether the fixed memory and the operations of a step fit."""
        rules, planned, settings = self.rules, self.planned, self.members.work.settings
        steps, clients, examples = planned.steps.rows.shape
        return (
            (id(model), planned.finish, type(self.members.numbers), self.uneven, self.short),
            (clients, examples, _capacity(steps), planned.inputs.data_ptr(), planned.targets.data_ptr()),
            replace(settings, learning_rate=1.0),  # a step reads its rate from memory
            (rules.terms.gradient, rules.terms.anchored, rules.u is None, rules.v is None),
            (rules.a is None, rules.mu is None, rules.gamma is None),
        )


def has_short_batches(members: Members) -> bool:
    """Whether some batch of the local steps has fewer examples than the others."""
    if not isinstance(members.batches, Planned):
        return False
    plan, last = members.batches.steps, members.steps[-1]
    width = plan.rows.shape[2]
    return any(min(sizes) < width for sizes in plan.sizes[:last]) or any(
        size < width
        for number, sizes in enumerate(plan.sizes[last:], last)
        for size, count in zip(sizes, members.steps, strict=True)
        if number < count
    )


def _capacity(steps: int) -> int:
    return 1 << (steps - 1).bit_length()


def schedule_of(group: Group) -> Schedule:
    """The schedule of a group, with room for more steps than it has."""
    planned, ones = group.planned, group.ones
    rows = planned.steps.rows
    more = _capacity(len(rows)) - len(rows)

    def with_room(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])]) if more else tensor.clone()

    active = weights = None
    if group.short or group.uneven:
        sizes = planned.steps.placed_sizes
        if sizes is None:
            sizes = tree.uploaded(planned.steps.sizes, torch.int64, ones.device)
        real = torch.arange(rows.shape[2], device=ones.device) < sizes[..., None]
        active = with_room(sizes > 0) if group.uneven else None
        weights = with_room(real / sizes.clamp(min=1)[..., None].to(ones.dtype)) if group.short else None
    _, rates = rates_of_group(group.members, ones)
    return Schedule(with_room(rows), with_room(rates), active, weights, [with_room(it) for it in planned.drawn])


def rates_of_group(members: Members, like: Tensor) -> tuple[list[list[float]], Tensor]:
    """The rates of the clients that make each step; and on the device those of `rates_of_all`."""
    rates = rates_by_step(members.work.settings, members.steps)
    placed = members.rates
    if placed is None:
        placed = tree.uploaded_together([rates_of_all(rates)], like.device)[0]
    return rates, placed


def rates_of_all(rates: Sequence[Sequence[float]]) -> Tensor:
    """Rates as `rates_by_step` has them, [steps, clients], 0 where a client is done."""
    clients = len(rates[0])
    return torch.tensor([[*row] + [0.0] * (clients - len(row)) for row in rates], dtype=torch.float64)


def at(tensor: Tensor, number: Tensor) -> Tensor:
    """tensor[number], without reading the number on the host."""
    return tensor.index_select(0, number).squeeze(0)
