"""Examples in memory: two tensors, the fastest form of data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.errors import TaskError


@dataclass(frozen=True)
class Examples:
    """A data set in memory. It is copied to the training device once.

    inputs: [n, ...]; targets: [n] or [n, ...]; augment: batch of inputs -> batch of inputs. It runs on the device in
    every training step and must use only torch's default generators, which are seeded for each round.
    """

    inputs: Tensor
    targets: Tensor
    augment: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise TaskError(f"expected as many inputs as targets, got {len(self.inputs)} and {len(self.targets)}")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, which: Tensor | slice) -> Examples:
        """The examples at an index tensor, a mask or a slice; `examples[:0]` is empty."""
        return Examples(self.inputs[which], self.targets[which], self.augment)

    @property
    def own_batches(self) -> int:
        """0: the caller chooses the batches."""
        return 0

    def to(self, device: torch.device | str) -> Examples:
        """The same examples on a device."""
        return Examples(self.inputs.to(device), self.targets.to(device), self.augment)
