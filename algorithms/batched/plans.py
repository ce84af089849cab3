"""Where the batches of a group come from: each client's own iterator, or a plan made before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.batched.batches import Finish, Joined, Separate, finished
from algorithms.batched.modules import RandomStream
from algorithms.batches import Batch, examples_of, to_device
from algorithms.client import LocalData


class Drawn:
    """Batches from an iterator of each client, which draw from its stream."""

    def __init__(self, data: Sequence[LocalData], streams: Sequence[RandomStream]) -> None:
        self._data, self._streams = data, streams
        self._batches = [iter(each.batches) for each in data]

    def at(self, step: int, active: int) -> Separate:
        """The batches of the first clients, read in the order of the steps. Raises ValueError where one is missing."""
        raw = [self._next(self._batches, position) for position in range(active)]
        if any(batch is None for batch in raw):
            client = raw.index(None)
            raise ValueError(f"expected {self._data[client].steps} batches for the local steps, got {step}")
        complete = finished(raw, [each.finish for each in self._data[:active]])
        return self._moved(complete)

    def whole(self) -> Iterator[tuple[list[int], Separate]]:
        """The next batch of the whole local set of every client that has one, with the clients' positions."""
        batches, positions = [iter(each.whole) for each in self._data], [*range(len(self._data))]
        while positions:
            drawn = [(position, self._next(batches, position)) for position in positions]
            positions = [position for position, batch in drawn if batch is not None]
            if positions:
                yield positions, self._moved([batch for _, batch in drawn if batch is not None])

    def _next(self, batches: Sequence[Iterator[Batch]], position: int) -> Batch | None:
        with self._streams[position].use():
            return next(batches[position], None)

    def _moved(self, batches: Sequence[Batch]) -> Separate:
        moved = [to_device(batch, self._streams[0].device) for batch in batches]
        if not all(examples_of(batch) for batch in moved):
            raise ValueError("expected at least one example in every batch, got a batch of none; leave it out")
        return Separate(moved)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which examples are in which batch: of all clients that are first by their number of batches."""

    rows: Tensor
    """[batches, clients, examples] in the data of all clients, on its device; a short batch is filled with its first
    example, and a client without a batch has any rows."""
    sizes: Sequence[Sequence[int]]
    """[batches][clients]: real examples; 0 for a client without a batch."""


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

    def at(self, step: int, active: int) -> Joined:
        """The batches of a step of the first clients."""
        inputs, targets, sizes = self._chosen(self.steps, step, active)
        if self.finish is not None:
            inputs, targets = completed(self.finish, inputs, targets, self._numbers(step, inputs, sizes))
        return Joined((inputs, targets), sizes)

    def whole(self) -> Iterator[tuple[list[int], Joined]]:
        """See `Drawn.whole`."""
        if self.all_once is None:
            raise RuntimeError("expected a plan of the whole local sets for full gradients, got none")
        for number, sizes in enumerate(self.all_once.sizes):
            active = sum(size > 0 for size in sizes)
            inputs, targets, _ = self._chosen(self.all_once, number, active)
            if self.prepare is not None:
                inputs, targets = completed(self.prepare, inputs, targets, ())
            yield [*range(active)], Joined((inputs, targets), sizes[:active])

    def _chosen(self, plan: Plan, number: int, active: int) -> tuple[Tensor, Tensor, Sequence[int]]:
        """A batch of the first clients as it is kept, and its sizes."""
        sizes = plan.sizes[number][:active]
        rows = plan.rows[number, :active, : max(sizes)]
        return self.inputs[rows], self.targets[rows], sizes

    def _numbers(self, step: int, inputs: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """What `draw` gives each client for its real examples, [clients, examples, ...]."""
        if self.draw is None or self.drawn:
            return [each[step, : inputs.shape[0], : inputs.shape[1]] for each in self.drawn]
        of_clients = []
        for row, size, stream in zip(inputs, sizes, self.streams, strict=False):
            with stream.use():
                of_clients.append([_padded(each, len(row)) for each in self.draw(row[:size])])
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
    return [each.unflatten(0, rows.shape) for each in found]


def completed(finish: Finish, inputs: Tensor, targets: Tensor, drawn: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Batches [clients, examples, ...] after their last step, which works on each example by itself."""
    whole = finish(tuple(each.flatten(0, 1) for each in (inputs, targets, *drawn)))
    done_inputs, done_targets = (each.unflatten(0, inputs.shape[:2]) for each in whole)
    return done_inputs, done_targets


def _padded(tensor: Tensor, size: int) -> Tensor:
    missing = size - len(tensor)
    return torch.cat([tensor, tensor[:1].expand(missing, *tensor.shape[1:])]) if missing else tensor
