"""Mini-batches of a client's examples. Their order depends only on the seed and is the same on every device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from tasks.base import Examples, TaskError


def seed_everything(seed: int) -> None:
    """Seed torch's default generators, CPU and CUDA: dropout, augmentation and the initial model use them."""
    # Without an accelerator torch.manual_seed stores a stack trace, which costs more than the seeding.
    (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(seed)


def count_steps(num_examples: int, batch_size: int, *, epochs: int | None = None, steps: int | None = None) -> int:
    """The number of batches that `batches` yields for these settings: K_i of the papers."""
    _check(num_examples, batch_size, epochs, steps)
    return steps if steps is not None else (epochs or 0) * -(-num_examples // batch_size)


def batches(  # noqa: PLR0913 - epochs and steps are alternatives
    examples: Examples, batch_size: int, seed: int, *, epochs: int | None = None, steps: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled (inputs, targets) batches on the device of `examples`, augmented, for either `epochs` or `steps`.

    Every epoch has a new order. Its last batch is smaller if the batch size does not divide the number of examples.
    With `steps`, epochs repeat until there are enough batches. Raises TaskError for no examples and invalid settings.
    """
    total = count_steps(len(examples), batch_size, epochs=epochs, steps=steps)
    return islice(_endless(examples, batch_size, seed), total)


def ordered_batches(examples: Examples, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of all examples in order, without augmentation, for the gradient of the whole local set.

    They are views of the examples; only the last one may be smaller than `batch_size`. Raises TaskError as `batches`
    does.
    """
    _check(len(examples), batch_size, 1, None)
    return zip(torch.split(examples.inputs, batch_size), torch.split(examples.targets, batch_size), strict=True)


def _endless(examples: Examples, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    # Always on the CPU, so that daemons on CUDA and on a CPU have the same order.
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
