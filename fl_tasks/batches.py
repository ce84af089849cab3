"""Mini-batches of a client's examples. Their order depends only on the seed and is the same on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from algorithms.batches import Apart, Batch
from fl_tasks.data.batched import Batched
from fl_tasks.data.examples import Augmentation, Examples
from fl_tasks.data.forms import Data
from fl_tasks.data.samples import Samples
from fl_tasks.errors import TaskError


def seed_everything(seed: int) -> None:
    """Seed torch's default generators, CPU and CUDA: dropout, augmentation and the initial model use them."""
    # Without an accelerator torch.manual_seed stores a stack trace, which costs more than the seeding.
    (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(seed)


def count_steps(  # noqa: PLR0913 - epochs and steps are alternatives
    num_examples: int, batch_size: int, *, epochs: int | None = None, steps: int | None = None, own_batches: int = 0
) -> int:
    """The number of batches that `batches` yields for these settings: K_i of the papers.

    own_batches: batches of an epoch if the data has its own (`data.own_batches`); the batch size has no effect then.
    """
    _check(num_examples, batch_size, epochs, steps)
    return steps if steps is not None else (epochs or 0) * (own_batches or -(-num_examples // batch_size))


def batches(  # noqa: PLR0913 - epochs and steps are alternatives
    data: Data, batch_size: int, seed: int, *, epochs: int | None = None, steps: int | None = None
) -> Iterator[Batch]:
    """Shuffled batches on the device of `data`, augmented, for either `epochs` or `steps`.

    Examples give pairs (inputs, targets), Samples what their collate function makes, Batched their own batches, in
    whose order and size nothing is changed. Every epoch has a new order. Its last batch is smaller if the batch size
    does not divide the number of examples. With `steps`, epochs repeat until there are enough batches. Raises TaskError
    for no examples, invalid settings and an error in the code of the data.
    """
    raw, finish = raw_batches(data, batch_size, seed, epochs=epochs, steps=steps)
    return raw if finish is None else map(finish, raw)


@dataclass(frozen=True)
class Finish:
    """Completes batches of Examples: (inputs as they are kept, targets, numbers drawn for them) -> (inputs, targets).

    Each example by itself, so batches of several clients may be completed as one.
    """

    prepare: Callable[[Tensor], Tensor] | None
    augment: Augmentation | None

    def __call__(self, raw: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The complete batch."""
        inputs, targets, *drawn = raw
        if self.prepare is not None:
            inputs = self.prepare(inputs)
        return (inputs if self.augment is None else self.augment.apply(inputs, *drawn)), targets


def raw_batches(  # noqa: PLR0913 - the parameters of `batches`
    data: Data, batch_size: int, seed: int, *, epochs: int | None = None, steps: int | None = None, start: int = 0
) -> tuple[Iterator[Batch], Finish | None]:
    """`batches` before the last step, and that step; None where the batches are complete.

    start: batches of the seed's order that come before the first one. They are not made, unless the data has its own
    batches, of which those of the first epoch are.
    """
    total = count_steps(len(data), batch_size, epochs=epochs, steps=steps, own_batches=data.own_batches)
    if isinstance(data, Examples):
        finish, orders = finish_of(data), _endless_orders(len(data), batch_size, seed, start)
        return _shuffled(data, islice(orders, total), finish), finish
    if isinstance(data, Samples):
        orders = _endless_orders(len(data), batch_size, seed, start)
        return data.read_epochs(((epoch, chosen.tolist()) for epoch, chosen in islice(orders, total)), seed), None
    epoch, within = divmod(start, data.own_batches)
    return islice(data.epochs(seed, epoch), within, within + total), None


def poisson_batches(data: Examples | Samples, draws: Iterable[Tensor], seed: int = 0) -> Iterator[Batch | Apart]:
    """Complete batches of drawn positions, each [drawn], int64; some have no example.

    Each example is augmented, or read and collated, by itself, so that nothing of another one is in it. seed: of the
    augmentations of Samples, by step and position.
    """
    return _drawn_samples(data, draws, seed) if isinstance(data, Samples) else _drawn_examples(data, draws)


def _drawn_samples(samples: Samples, draws: Iterable[Tensor], seed: int) -> Iterator[Apart]:
    drawn: list[list[int]] = [one.tolist() for one in draws]
    singles = ((step, [position]) for step, positions in enumerate(drawn) for position in positions)
    read = samples.read_epochs(singles, seed)
    for positions in drawn:
        yield Apart.of([next(read) for _ in positions])


def _drawn_examples(examples: Examples, draws: Iterable[Tensor]) -> Iterator[Batch]:
    finish, augment = finish_of(examples), examples.augment
    for drawn in draws:
        chosen = drawn.to(examples.inputs.device)
        inputs, targets = examples.inputs[chosen], examples.targets[chosen]
        if not len(chosen) or (finish is None and augment is None):
            yield inputs, targets
        elif finish is not None:
            yield finish((inputs, targets, *(() if finish.augment is None else finish.augment.draw(inputs))))
        else:
            prepared = inputs if examples.prepare is None else examples.prepare(inputs)
            yield torch.cat([cast(Callable[[Tensor], Tensor], augment)(one) for one in prepared.split(1)]), targets


def finish_of(examples: Examples) -> Finish | None:
    """None: there is nothing to do, or an augmentation that draws its numbers while it changes a batch."""
    augment, prepare = examples.augment, examples.prepare
    if augment is None:
        return None if prepare is None else Finish(prepare, None)
    return Finish(prepare, augment) if isinstance(augment, Augmentation) else None


Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The batches of several clients whose examples are in one tensor, in the order and of the size of `batches`."""

    rows: Tensor
    """[batches, clients, examples], int64. A short batch is filled with its first example. A client without a batch,
    because it has fewer than others, has row 0."""
    sizes: list[list[int]]
    """[batches][clients]: the number of real examples."""
    counts: list[int]
    """Batches of each client."""


def plan_batches(  # noqa: PLR0913 - epochs and steps are alternatives
    clients: Sequence[Rows],
    batch_size: int,
    seeds: Sequence[int],
    *,
    epochs: int | None = None,
    steps: int | None = None,
) -> BatchPlan:
    """The plan of the batches that `batches` yields for each client.

    clients: where each one's examples are. seeds: of each; without any the examples are in order, as in
    `ordered_batches`. Raises TaskError as `batches`.
    """
    of_size: dict[int, list[int]] = {}
    for number, own in enumerate(clients):
        of_size.setdefault(len(own), []).append(number)
    count_of = {size: count_steps(size, batch_size, epochs=epochs, steps=steps) for size in of_size}
    width, generator, counts = min(batch_size, max(of_size)), torch.Generator(), [count_of[len(own)] for own in clients]
    rows = np.zeros((max(counts), len(clients), width), dtype=np.int64)
    sizes = np.zeros((max(counts), len(clients)), dtype=np.int64)
    for size, numbers in of_size.items():
        count, per_epoch = count_of[size], -(-size // batch_size)
        chosen = np.empty((len(numbers), -(-count // per_epoch), per_epoch * width), dtype=np.int64)
        for place, number in enumerate(numbers):
            own = clients[number]
            if seeds:
                generator.manual_seed(seeds[number])
            for order in chosen[place]:
                order[:size] = own[torch.randperm(size, generator=generator).numpy()] if seeds else own
        chosen[:, :, size:] = chosen[:, :, (per_epoch - 1) * width, None]
        rows[:count, numbers] = chosen.reshape(len(numbers), -1, width)[:, :count].swapaxes(0, 1)
        one_epoch = [width] * (per_epoch - 1) + [size - (per_epoch - 1) * width]
        sizes[:count, numbers] = np.resize(one_epoch, count)[:, None]
    return BatchPlan(torch.from_numpy(rows), sizes.tolist(), counts)


def ordered_batches(data: Data, batch_size: int) -> Iterator[Batch]:
    """Batches of all examples in order, for evaluation and the gradient of the whole local set.

    Of Examples they are without augmentation, and views if there is nothing to prepare; of a data set they are seeded
    by 0. Only the last one may be smaller than `batch_size`; Batched data has its own sizes. Raises TaskError as
    `batches` does.
    """
    _check(len(data), batch_size, 1, None)
    if isinstance(data, Examples):
        parts = zip(torch.split(data.inputs, batch_size), torch.split(data.targets, batch_size), strict=True)
        return parts if data.prepare is None else map(Finish(data.prepare, None), parts)
    if isinstance(data, Batched):
        return data.epoch(0)
    size = len(data)
    return data.read((range(at, min(at + batch_size, size)) for at in range(0, size, batch_size)), 0)


def _shuffled(
    examples: Examples, orders: Iterator[tuple[int, Tensor]], finish: Finish | None
) -> Iterator[tuple[Tensor, ...]]:
    """Batches for `finish`, or complete ones if it is None."""
    augment, prepare, device = examples.augment, examples.prepare, examples.inputs.device
    for _, positions in orders:
        chosen = positions.to(device)
        inputs, targets = examples.inputs[chosen], examples.targets[chosen]
        if finish is not None:
            yield inputs, targets, *(() if finish.augment is None else finish.augment.draw(inputs))
        elif augment is not None:
            yield augment(inputs if prepare is None else prepare(inputs)), targets
        else:
            yield inputs, targets


def _endless_orders(size: int, batch_size: int, seed: int, start: int) -> Iterator[tuple[int, Tensor]]:
    """(epoch, positions) of each batch from number `start` on. An epoch that is skipped costs the draw of its order."""
    # Always on the CPU, so that daemons on CUDA and on a CPU have the same order.
    generator, (first, within) = torch.Generator().manual_seed(seed), divmod(start, -(-size // batch_size))
    for epoch in count():
        order = torch.randperm(size, generator=generator)
        if epoch >= first:
            for chosen in torch.split(order, batch_size)[within if epoch == first else 0 :]:
                yield epoch, chosen


def _check(num_examples: int, batch_size: int, epochs: int | None, steps: int | None) -> None:
    if num_examples < 1:
        raise TaskError("expected at least one example to train on, got none: is this client's shard empty?")
    if batch_size < 1:
        raise TaskError(f"expected a batch size of 1 or more, got {batch_size}")
    if (epochs is None) == (steps is None):
        raise TaskError(f"expected either epochs or steps, got epochs={epochs} and steps={steps}")
    if (length := steps if epochs is None else epochs) is not None and length < 1:
        raise TaskError(f"expected 1 or more {'steps' if epochs is None else 'epochs'}, got {length}")
