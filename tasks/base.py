"""What a task is: the model, the loss, the data and the metrics that an ML engineer brings.

A task is any object with the members of `Task`; nothing has to be inherited. It is installed on the server (which makes
the first model and evaluates) and on every device (which trains), and is named `module:attribute` in both
configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True)
class Examples:
    """A data set in memory: it goes to the training device once.

    inputs: [n, ...]; targets: [n] or [n, ...]; augment: batch of inputs -> batch of inputs, run on the device in every
    training step, drawing only from torch's default generators (they are seeded for each round).
    """

    inputs: Tensor
    targets: Tensor
    augment: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"expected as many inputs as targets, got {len(self.inputs)} and {len(self.targets)}")

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Shard:
    """Which part of a task's data a client holds: indices into the task's training set, or a folder of its own files.

    Neither set: the whole training set.
    """

    indices: Tensor | None = None
    folder: Path | None = None

    def of(self, examples: Examples) -> Examples:
        """The part of `examples` that the indices name; all of them without indices."""
        if self.indices is None:
            return examples
        return Examples(examples.inputs[self.indices], examples.targets[self.indices], examples.augment)


@runtime_checkable
class Task(Protocol):
    """One learning problem. Metrics are averaged over examples, so a metric returns one value for each example."""

    version: str
    """Raised by the author when clients of the older code must not take part any more."""

    def model(self) -> nn.Module:
        """A new model; its initial values come from torch's default generator, which the caller seeds."""
        ...

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean loss of a batch, a scalar to differentiate."""
        ...

    def train_data(self, shard: Shard) -> Examples:
        """The training examples of a shard."""
        ...

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """Held-out examples: the server's for None, else the shard's own held-out part (may be empty)."""
        ...

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """Values by name, one for each example of the batch, shape [batch]: {"loss": ..., "accuracy": ...}."""
        ...


