"""The batches of one step of many clients, and what cannot be done in lockstep.

Clients whose batches have the same shapes go through the model together. A shorter batch may be filled with copies of
its first example, if the examples do not influence each other's outputs: the loss is computed from the outputs of the
real examples only, so every loss of a batch is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.batches import Batch, examples_of, leaves, map_leaves, split
from algorithms.client import LocalData, Work
from algorithms.parameters import AlgorithmError


class NotBatched(AlgorithmError):
    """The work is possible only for one client after the other."""

    def __init__(self, what: str) -> None:
        super().__init__(f"clients in lockstep: {what}; use --engine sequential")


def check_work(data: LocalData, work: Work) -> None:
    """Raises NotBatched for work that clients cannot do together, and ValueError without a number of steps."""
    if data.loop is not None:
        raise NotBatched("expected the usual local steps, got a task with a training loop of its own")
    if work.personal:
        raise NotBatched("expected a model without personal parameters, got " + ", ".join(sorted(work.personal)[:5]))
    if work.settings.micro_batch_size:
        raise NotBatched(f"expected whole batches, got micro_batch_size = {work.settings.micro_batch_size}")
    if work.settings.scaled_loss:
        raise NotBatched("expected precision = float32 or bfloat16, got float16, whose loss scale is of one client")
    if work.algorithm.exchanges[work.exchange].trains and data.steps < 1:
        raise ValueError(f"expected the number of each client's steps, 1 or more, got {data.steps}")


Signature = tuple[object, ...]
Finish = Callable[[Batch], Batch]


@dataclass(frozen=True, slots=True)
class Group:
    """Clients whose batches form one tensor."""

    positions: Sequence[int]
    """Positions of the clients in the stack."""
    batch: Batch
    """Every tensor is [clients, examples, ...]."""
    sizes: Sequence[int]
    """Real examples of each client; the others are copies."""
    weights: Tensor | None = None
    """[clients, examples]: the loss is the sum of these times the examples' losses. None: it is that of the sizes."""

    def by_size(self) -> list[tuple[int, list[int]]]:
        """(real examples, the places in this group of the clients that have so many), the most first."""
        places: dict[int, list[int]] = {}
        for place, size in enumerate(self.sizes):
            places.setdefault(size, []).append(place)
        return sorted(places.items(), reverse=True)


@dataclass(frozen=True, slots=True)
class Separate:
    """A batch of any structure for each client."""

    batches: Sequence[Batch]

    def groups(self, *, fill: bool) -> list[Group]:
        """See `group`."""
        return group(self.batches, fill=fill)

    def of_client(self, position: int) -> Batch:
        """One client's batch."""
        return self.batches[position]

    def weights_of(self, position: int) -> None:
        """See `Joined`: these batches have none."""

    def counts(self) -> list[int]:
        """The number of each client's examples."""
        return [examples_of(batch) for batch in self.batches]


@dataclass(frozen=True, slots=True)
class Joined:
    """The batches (inputs, targets) of all clients as one: the tensors are [clients, examples, ...]."""

    batch: Batch
    sizes: Sequence[int]
    """Real examples of each client; the others are copies."""
    weights: Tensor | None = None
    """The weights of a Group."""

    def groups(self, *, fill: bool) -> list[Group]:
        """Clients of one size in a group each; all in one where the sizes are equal, or with `fill`."""
        one = Group(range(len(self.sizes)), self.batch, self.sizes, self.weights)
        if self.weights is not None or fill or len(set(self.sizes)) == 1:
            return [one]
        inputs, targets = self.batch
        return [
            Group(places, (inputs[places, :size], targets[places, :size]), [size] * len(places))
            for size, places in one.by_size()
        ]

    def of_client(self, position: int) -> Batch:
        """One client's batch."""
        inputs, targets = self.batch
        size = self.sizes[position]
        return inputs[position, :size], targets[position, :size]

    def weights_of(self, position: int) -> Tensor | None:
        """The weights of one client's examples; None for a batch without weights."""
        return None if self.weights is None else self.weights[position]

    def counts(self) -> Sequence[int]:
        """The number of each client's examples."""
        return self.sizes


StepBatches = Separate | Joined
"""The batches of one step, of the first clients of a stack."""


def group(batches: Sequence[Batch], *, fill: bool) -> list[Group]:
    """The clients' batches in groups that can be stacked.

    fill: shorter batches are filled up to the longest one of the same kind.

    Raises:
        NotBatched: a batch has a part that is not a tensor.
    """
    places: dict[Signature, list[int]] = {}
    for position, batch in enumerate(batches):
        places.setdefault(_signature(batch, with_size=not fill), []).append(position)
    return [_group(positions, [batches[position] for position in positions]) for positions in places.values()]


def _group(positions: list[int], batches: list[Batch]) -> Group:
    sizes = tuple(_size(batch) for batch in batches)
    longest = max(sizes)
    filled = [
        batch if size == longest else map_leaves(lambda leaf: _filled(leaf, longest), batch)
        for size, batch in zip(sizes, batches, strict=True)
    ]
    return Group(positions, _stacked(filled), sizes)


def finished(batches: Sequence[Batch], finishes: Sequence[Finish | None]) -> list[Batch]:
    """The clients' batches, completed: as one batch if all have the same last step."""
    first = finishes[0]
    if len(batches) > 1 and first is not None and all(each == first for each in finishes):
        parts = zip(*(leaves(batch) for batch in batches), strict=True)
        whole = first(tuple(torch.cat(part) for part in parts))
        sizes = [_size(batch) for batch in batches]
        return [*zip(*(leaf.split(sizes) for leaf in leaves(whole)), strict=True)]
    return [batch if finish is None else finish(batch) for batch, finish in zip(batches, finishes, strict=True)]


def fillable(batch: Batch) -> bool:
    """Whether every part of a batch has the examples along its first dimension."""
    parts = list(leaves(batch))
    return (
        all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in parts) and len({len(leaf) for leaf in parts}) == 1
    )


def copies_of_first(batch: Batch) -> Batch:
    """A batch of the same shape in which every example is the first one."""
    return map_leaves(lambda leaf: leaf[:1].expand_as(leaf).contiguous(), batch)


def real(value: Batch, size: int) -> Batch:
    """The first `size` examples of outputs or targets of one client."""
    return split(value, size)[0]


def _size(batch: Batch) -> int:
    return next((len(leaf) for leaf in leaves(batch) if leaf.dim()), 0)


def _filled(leaf: Tensor, size: int) -> Tensor:
    return torch.cat([leaf, leaf[:1].expand(size - len(leaf), *leaf.shape[1:])])


def _stacked(batches: list[Batch]) -> Batch:
    tensors = zip(*(leaves(batch) for batch in batches), strict=True)
    stacked = iter([torch.stack(parts) for parts in tensors])
    return map_leaves(lambda _: next(stacked), batches[0])


def _signature(batch: Batch, *, with_size: bool) -> Signature:
    shapes: list[object] = []
    for leaf in leaves(batch):
        if not isinstance(leaf, Tensor):
            raise NotBatched(f"expected batches of tensors, got {type(leaf).__name__} in a batch")
        shape = tuple(leaf.shape)
        shapes.append((leaf.dtype, shape if with_size else (len(shape), *shape[1:])))
    return tuple(shapes)
