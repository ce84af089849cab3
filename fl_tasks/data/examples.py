"""Examples in memory: two tensors, the fastest form of data; the labels that they may have; a part to hold out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from algorithms.batches import Batch, is_pair
from fl_tasks.errors import TaskError

IGNORED = -100
"""The label that torch's losses leave out."""


@dataclass(frozen=True)
class LabelRange:
    """Checks that labels are numbers of these classes."""

    classes: tuple[str, ...]
    what: str
    """The data in words, for errors."""

    def check(self, targets: Tensor) -> None:
        """Raises TaskError for class numbers out of range. Targets [n, k] of a floating type are probabilities."""
        classes = self.classes
        if targets.is_floating_point():
            if targets.dim() == 1 and len(targets):
                came = f"got {targets.dtype}: convert them with .long()"
                raise TaskError(f"{self.what}: expected class numbers as labels, {came}")
            return
        wrong = ((targets < 0) | (targets >= len(classes))) & (targets != IGNORED)
        if count := int(wrong.sum()):
            place = int(wrong.flatten(1).any(dim=1).nonzero()[0]) if wrong.dim() > 1 else int(wrong.nonzero()[0])
            raise TaskError(
                f"{self.what}: expected labels of 0 to {len(classes) - 1} ({shown(classes)}), got {count} others, as"
                f" {int(targets[wrong][0])} of example {place}"
            )

    def checked(self, batch: Batch) -> Batch:
        """The same batch, whose targets are checked if it is a pair (inputs, targets) in the CPU's memory.

        Which part of another batch is the label is not known. A check on an accelerator would wait for it in each step.
        """
        if is_pair(batch) and batch[1].device.type == "cpu" and batch[1].dim():
            self.check(batch[1])
        return batch


def shown(names: Sequence[object], most: int = 8) -> str:
    """The first names of a list, and how many more there are."""
    listed = ", ".join(str(name)[:40] for name in names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed


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
    own_batches: ClassVar[int] = 0
    """The caller chooses the batches."""

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise TaskError(f"expected as many inputs as targets, got {len(self.inputs)} and {len(self.targets)}")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, which: Tensor | slice) -> Examples:
        """The examples at an index tensor, a mask or a slice; `examples[:0]` is empty."""
        return replace(self, inputs=self.inputs[which], targets=self.targets[which])

    def to(self, device: torch.device | str) -> Examples:
        """The same examples on a device; a copy to a GPU is not waited for, one from it is."""
        upload = torch.device(device).type == "cuda"
        inputs, targets = (part.to(device, non_blocking=upload) for part in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)

    def prepared(self) -> Tensor:
        """All inputs as the model gets them, without augmentation."""
        return self.inputs if self.prepare is None else self.prepare(self.inputs)


def split_shard(examples: Examples, fraction: float, order: Tensor | None = None) -> tuple[Examples, Examples]:
    """(training part, held-out part) of a shard. floor(fraction * n) examples are held out, without augmentation.

    They are evenly spaced in the shard's order, so that a shard sorted by class yields some of each class, and the
    split is always the same; or the first of `order`, places [n]. Raises TaskError for a fraction outside [0, 1).
    """
    count = int(checked_fraction(fraction) * len(examples))
    evaluation = torch.arange(count) * len(examples) // max(count, 1)
    if order is not None:
        evaluation = order[:count].sort().values
    held_out = replace(examples[evaluation], augment=None)
    if not count:
        return examples, held_out
    trained = torch.ones(len(examples), dtype=torch.bool)
    trained[evaluation] = False
    return examples[trained], held_out


def checked_fraction(fraction: float) -> float:
    """Return the option client_eval_fraction. Raises TaskError unless it is in [0, 1)."""
    if not 0 <= fraction < 1:
        raise TaskError(f"expected client_eval_fraction from 0 to below 1, got {fraction}")
    return fraction
