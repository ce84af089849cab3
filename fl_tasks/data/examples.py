"""Examples in memory: two tensors, the fastest form of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fl_tasks.errors import TaskError


@runtime_checkable
class Augmentation(Protocol):
    """An augmentation whose random numbers are drawn apart, so that batches of many clients are changed as one.

    `draw` uses only torch's default generators and the shape and device of the inputs. What it returns has the examples
    along its first dimension. `apply` draws nothing and changes each example by itself. The inputs that `draw` gets are
    those that are kept, before `Examples.prepare`.
    """

    def __call__(self, inputs: Tensor) -> Tensor:
        """`apply` with numbers of `draw`."""
        ...

    def draw(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """The random numbers for a batch."""
        ...

    def apply(self, inputs: Tensor, *drawn: Tensor) -> Tensor:
        """The batch, changed by these numbers."""
        ...


@dataclass(frozen=True)
class Examples:
    """A data set in memory. It is copied to the training device once.

    inputs: [n, ...]; targets: [n] or [n, ...]; augment: batch of inputs -> batch of inputs. It runs on the device in
    every training step and must use only torch's default generators, which are seeded for each round.
    prepare: batch of inputs as they are kept -> batch as the model and `augment` get it, for example bytes to
    normalised floats, which take four times the memory. It runs on the device on every batch, in evaluations too. It
    draws no random number and prepares each example by itself.
    classes: names of the classes as these targets number them. A task with `classes` renumbers them by name.
    """

    inputs: Tensor
    targets: Tensor
    augment: Callable[[Tensor], Tensor] | None = None
    prepare: Callable[[Tensor], Tensor] | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise TaskError(f"expected as many inputs as targets, got {len(self.inputs)} and {len(self.targets)}")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, which: Tensor | slice) -> Examples:
        """The examples at an index tensor, a mask or a slice; `examples[:0]` is empty."""
        return replace(self, inputs=self.inputs[which], targets=self.targets[which])

    @property
    def own_batches(self) -> int:
        """0: the caller chooses the batches."""
        return 0

    def to(self, device: torch.device | str) -> Examples:
        """The same examples on a device."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    def prepared(self) -> Tensor:
        """All inputs as the model gets them, without augmentation."""
        return self.inputs if self.prepare is None else self.prepare(self.inputs)
