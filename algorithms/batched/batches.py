"""The batches of one step of many clients as one, and where they come from: a plan, or an iterator of each client.

A shorter batch is filled with copies of its first example, which no result depends on: either the losses of the real
examples alone are computed, or clients with batches of one size go through the model together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.batched.modules import RandomStream
from algorithms.batches import Batch, examples_of, leaves, map_leaves, split, to_device
from algorithms.client import LocalData, Work
from algorithms.parameters import AlgorithmError

Finish = Callable[[Batch], Batch]


class NotBatched(AlgorithmError):
    """Clients cannot do the work together, only one after the other. The text names the reason."""


def check_work(data: LocalData, work: Work) -> None:
    """Raises NotBatched for work that clients cannot do together, and ValueError without a number of steps."""
    if data.loop is not None:
        raise NotBatched("the task has a training loop of its own")
    if work.personal:
        raise NotBatched("personal parameters: " + ", ".join(sorted(work.personal)[:5]))
    if work.settings.micro_batch_size:
        raise NotBatched(f"micro_batch_size = {work.settings.micro_batch_size}")
    if work.algorithm.exchanges[work.exchange].trains and data.steps < 1:
        raise ValueError(f"expected the number of each client's steps, 1 or more, got {data.steps}")


@dataclass(frozen=True, slots=True)
class StepBatches:
    """The batches of the first clients of a group."""

    batch: Batch
    """Every tensor is [clients, examples, ...]."""
    sizes: Sequence[int]
    """Real examples of each client; the others are copies."""
    weights: Tensor | None = None
    """[clients, examples]: the loss is the sum of these times the examples' losses. None: it is that of the sizes."""

    def of_client(self, position: int) -> Batch:
        """One client's batch, with copies where they have weights."""
        own = map_leaves(lambda leaf: leaf[position], self.batch)
        return own if self.weights is not None else real(own, self.sizes[position])

    def by_size(self) -> list[tuple[int, list[int]]]:
        """(real examples, the clients that have so many), the most first; one part if there are weights."""
        if self.weights is not None:
            return [(0, [*range(len(self.sizes))])]
        positions: dict[int, list[int]] = {}
        for position, size in enumerate(self.sizes):
            positions.setdefault(size, []).append(position)
        return sorted(positions.items(), reverse=True)

    def of_size(self, size: int, positions: Sequence[int]) -> Batch:
        """The batches of some clients, which all have this size."""
        longest, rows = max(self.sizes), [*positions]
        return map_leaves(lambda leaf: leaf[rows, :size] if _has(longest, leaf[0]) else leaf[rows], self.batch)


def stacked_batches(batches: Sequence[Batch]) -> StepBatches:
    """A batch of each client as one. Raises NotBatched for parts that are no tensors or differ in more than size."""
    parts, sizes = [[*leaves(batch)] for batch in batches], [examples_of(batch) for batch in batches]
    longest = max(sizes)
    if any(not isinstance(leaf, Tensor) for own in parts for leaf in own):
        raise NotBatched("batches have parts that are no tensors")
    filled = [[_filled(leaf, size, longest) for leaf in own] for own, size in zip(parts, sizes, strict=True)]
    if len({tuple((leaf.dtype, leaf.shape) for leaf in own) for own in filled}) > 1:
        raise NotBatched("the clients' batches have other parts or shapes")
    stacked = iter([torch.stack(same) for same in zip(*filled, strict=True)])
    return StepBatches(map_leaves(lambda _: next(stacked), batches[0]), sizes)


def real(value: Batch, size: int) -> Batch:
    """The first `size` examples of a batch, or of the outputs or targets of one client."""
    return split(value, size)[0]


def copies_of_first(batch: Batch) -> Batch:
    """A batch of the same shape in which every example is the first one."""
    return map_leaves(lambda leaf: leaf[:1].expand_as(leaf).contiguous(), batch)


def fillable(batch: Batch) -> bool:
    """Whether every part of a batch has the examples along its first dimension."""
    return all(isinstance(leaf, Tensor) and _has(examples_of(batch), leaf) for leaf in leaves(batch))


def _has(examples: int, leaf: Tensor) -> bool:
    return leaf.dim() > 0 and len(leaf) == examples


def _filled(leaf: Tensor, size: int, longest: int) -> Tensor:
    missing = longest - size if _has(size, leaf) else 0
    return torch.cat([leaf, leaf[:1].expand(missing, *leaf.shape[1:])]) if missing else leaf


class Drawn:
    """Batches from an iterator of each client, which draw from its stream."""

    def __init__(self, data: Sequence[LocalData], streams: Sequence[RandomStream]) -> None:
        self._data, self._streams = data, streams
        self._batches = [iter(own.complete) for own in data]

    def at(self, step: int, active: int) -> StepBatches:
        """The batches of the first clients, read in the order of the steps. Raises ValueError where one is missing."""
        batches = [self._next(self._batches, position) for position in range(active)]
        if any(batch is None for batch in batches):
            client = batches.index(None)
            raise ValueError(f"expected {self._data[client].steps} batches for the local steps, got {step}")
        return self._stacked(batches)

    def whole(self) -> Iterator[tuple[list[int], StepBatches]]:
        """The next batch of the whole local set of every client that has one, with the clients' positions."""
        batches, positions = [iter(own.whole) for own in self._data], [*range(len(self._data))]
        while positions:
            drawn = [(position, self._next(batches, position)) for position in positions]
            positions = [position for position, batch in drawn if batch is not None]
            if positions:
                yield positions, self._stacked([batch for _, batch in drawn if batch is not None])

    def _next(self, batches: Sequence[Iterator[Batch]], position: int) -> Batch | None:
        with self._streams[position].use():
            return next(batches[position], None)

    def _stacked(self, batches: Sequence[Batch]) -> StepBatches:
        if not all(examples_of(batch) for batch in batches):
            raise ValueError("expected at least one example in every batch, got a batch of none; leave it out")
        return stacked_batches([to_device(batch, self._streams[0].device) for batch in batches])


@dataclass(frozen=True, slots=True)
class Plan:
    """Which examples are in which batch: of all clients that are first by their number of batches."""

    rows: Tensor
    """[batches, clients, examples] in the data of all clients, on its device; a short batch is filled with its first
    example, and a client without a batch has any rows."""
    sizes: Sequence[Sequence[int]]
    """[batches][clients]: real examples; 0 for a client without a batch."""
    placed_sizes: Tensor | None = None
    """The same on the device of `rows`. None: they are uploaded where a step reads them."""


@dataclass(frozen=True, slots=True)
class Planned:
    """Batches of examples that are in one tensor for all clients, chosen before the first step."""

    inputs: Tensor
    """The inputs as they are kept, [examples, ...]."""
    targets: Tensor
    steps: Plan
    all_once: Plan | None = None
    """The whole local set of each client, in order, for a full gradient."""
    finish: Finish | None = None
    """What completes a batch, as LocalData has it; for `steps`."""
    prepare: Finish | None = None
    """The same for `all_once`, without random numbers."""
    streams: Sequence[RandomStream] = ()
    """The random streams of the clients, if `finish` needs numbers."""
    drawn: Sequence[Tensor] = ()
    """The numbers of all steps in place of those of the streams, [steps, clients, examples, ...]."""
    draw: Callable[[Tensor], Sequence[Tensor]] | None = None
    """Inputs -> the numbers that `finish` needs for them, from torch's default generators. None: it needs none."""
    seeds: Tensor | None = None
    """The clients' training seeds, as CountedNumbers has them. None: they are uploaded where they are needed."""
    stays: bool = True
    """Inputs and targets are the same tensors for all groups of a run."""

    def at(self, step: int, active: int) -> StepBatches:
        """The batches of a step of the first clients."""
        inputs, targets, sizes = self._chosen(self.steps, step, active)
        if self.finish is not None:
            inputs, targets = completed(self.finish, inputs, targets, self._numbers(step, inputs, sizes))
        return StepBatches((inputs, targets), sizes)

    def whole(self) -> Iterator[tuple[list[int], StepBatches]]:
        """See `Drawn.whole`."""
        if self.all_once is None:
            raise RuntimeError("expected a plan of the whole local sets for full gradients, got none")
        for number, sizes in enumerate(self.all_once.sizes):
            active = sum(size > 0 for size in sizes)
            inputs, targets, _ = self._chosen(self.all_once, number, active)
            if self.prepare is not None:
                inputs, targets = completed(self.prepare, inputs, targets, ())
            yield [*range(active)], StepBatches((inputs, targets), sizes[:active])

    def _chosen(self, plan: Plan, number: int, active: int) -> tuple[Tensor, Tensor, Sequence[int]]:
        """A batch of the first clients as it is kept, and its sizes."""
        sizes = plan.sizes[number][:active]
        rows = plan.rows[number, :active, : max(sizes)]
        return self.inputs[rows], self.targets[rows], sizes

    def _numbers(self, step: int, inputs: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """What `draw` gives each client for its real examples, [clients, examples, ...]."""
        if self.draw is None or self.drawn:
            return [numbers[step, : inputs.shape[0], : inputs.shape[1]] for numbers in self.drawn]
        of_clients = []
        for row, size, stream in zip(inputs, sizes, self.streams, strict=False):
            with stream.use():
                of_clients.append([_filled(numbers, size, len(row)) for numbers in self.draw(row[:size])])
        return [torch.stack(parts) for parts in zip(*of_clients, strict=True)]


def drawn_ahead(
    draw: Callable[[Tensor], Sequence[Tensor]], inputs: Tensor, rows: Tensor, seeds: Sequence[int]
) -> list[Tensor]:
    """The numbers of all steps of a group at once, [steps, clients, examples, ...], from torch's default generators.

    inputs: as they are kept; rows: as in Plan. The numbers depend on the seeds alone.
    """
    stream = RandomStream(inputs.device, hash((*seeds, len(seeds))) & (1 << 63) - 1)
    with stream.use():
        found = draw(inputs[:1].expand(rows.numel(), *inputs.shape[1:]))
    return [numbers.unflatten(0, rows.shape) for numbers in found]


def completed(finish: Finish, inputs: Tensor, targets: Tensor, drawn: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Batches [clients, examples, ...] after their last step, which works on each example by itself."""
    whole = finish(tuple(part.flatten(0, 1) for part in (inputs, targets, *drawn)))
    done_inputs, done_targets = (part.unflatten(0, inputs.shape[:2]) for part in whole)
    return done_inputs, done_targets
