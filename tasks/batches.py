"""The order in which a client sees its examples: a function of the seed alone, the same on every device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from tasks.base import Examples, TaskError


def seed_everything(seed: int) -> None:
    """Seed torch's default generators, CPU and CUDA: dropout, augmentation and a model's first values use them."""
    # For a device that is not there torch.manual_seed keeps a stack trace, which costs more than the seeding.
    (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(seed)


def count_steps(num_examples: int, batch_size: int, *, epochs: int | None = None, steps: int | None = None) -> int:
    """How many batches `batches` yields for these settings (K_i of the papers)."""
    _check(num_examples, batch_size, epochs, steps)
    return steps if steps is not None else (epochs or 0) * -(-num_examples // batch_size)


def batches(  # noqa: PLR0913 - as an epoch of data is asked for everywhere
    examples: Examples, batch_size: int, seed: int, *, epochs: int | None = None, steps: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled (inputs, targets) batches on the device of `examples`, augmented, for either `epochs` or `steps`.

    Every epoch is a new order; its last batch is smaller where the batch size does not divide the examples. With
    `steps` the data is gone round as often as needed, cut in the same way. Raises TaskError for no examples and for
    settings that make no sense.
    """
    total = count_steps(len(examples), batch_size, epochs=epochs, steps=steps)
    return islice(_endless(examples, batch_size, seed), total)


def whole(examples: Examples, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Every example once, in order and as it is, not augmented: for the gradient of the whole local set.

    Batches are views of the examples, of `batch_size` but for the last one. Raises TaskError as `batches` does.
    """
    _check(len(examples), batch_size, 1, None)
    return zip(torch.split(examples.inputs, batch_size), torch.split(examples.targets, batch_size), strict=True)


def _endless(examples: Examples, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    # On the CPU whatever the device: the order of a CUDA daemon is the order of a CPU daemon.
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(examples), generator=generator).to(examples.inputs.device)
        for chosen in torch.split(order, batch_size):
            inputs = examples.inputs[chosen]
            yield (inputs if examples.augment is None else examples.augment(inputs)), examples.targets[chosen]


def _check(num_examples: int, batch_size: int, epochs: int | None, steps: int | None) -> None:
    if num_examples < 1:
        raise TaskError("expected at least one example to train on, got none: is this client's shard empty?")
    if batch_size < 1:
        raise TaskError(f"expected a batch size of 1 or more, got {batch_size}")
    if (epochs is None) == (steps is None):
        raise TaskError(f"expected either epochs or steps, got epochs={epochs} and steps={steps}")
    if (length := steps if epochs is None else epochs) is not None and length < 1:
        raise TaskError(f"expected 1 or more {'steps' if epochs is None else 'epochs'}, got {length}")
