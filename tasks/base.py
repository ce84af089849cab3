"""The interface of a task: the model, the loss, the data and the metrics that an ML engineer provides.

A task is any object with the members of `Task`; it need not inherit from it. It is installed on the server, which makes
the first model and evaluates, and on every device, which trains. Both configurations name it `module:attribute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class TaskError(ValueError):
    """A task, its options, its data or its partition is invalid. The message names the remedy."""


@contextmanager
def task_code(what: str) -> Iterator[None]:
    """Run code of the task's author. Its exceptions become a TaskError that names `what` and has them as cause."""
    try:
        yield
    except TaskError:
        raise
    except Exception as error:  # a fault in the task's own code, of any type
        raise TaskError(f"{what} raised {type(error).__name__}: {error}") from error


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

    def to(self, device: torch.device | str) -> Examples:
        """The same examples on a device."""
        return Examples(self.inputs.to(device), self.targets.to(device), self.augment)


@dataclass(frozen=True)
class Shard:
    """A client's part of a task's data: indices into the task's training set, or a folder with files of its own.

    With neither, it is the whole training set.
    """

    indices: Tensor | None = None
    folder: Path | None = None

    def of(self, examples: Examples) -> Examples:
        """The examples at the indices, or all of them without indices.

        Raises TaskError for an index out of range, and for a folder: only the task can read its files.
        """
        if self.folder is not None:
            raise TaskError(f"this task brings its own data, so a shard must be indices, got the folder {self.folder}")
        if self.indices is None:
            return examples
        if len(self.indices) and not 0 <= int(self.indices.min()) <= int(self.indices.max()) < len(examples):
            raise TaskError(
                f"expected indices from 0 to {len(examples) - 1}, got {int(self.indices.min())} to"
                f" {int(self.indices.max())}: the partition was made for other data"
            )
        return examples[self.indices]


@runtime_checkable
class Task(Protocol):
    """One learning problem. Metrics are averaged over examples, so a metric returns one value for each example.

    A task may have three more members. `held_out` is a line of text that describes `eval_data(None)`; it is shown with
    results. `train_labels()` returns the class numbers [M] of the whole training set for partitioning;
    `train_data(Shard())` would need the memory of all inputs and may lack a held-out part. `train_groups()` returns
    the group number [M] of each example's writer, person or speaker, for partitioning by group.

    It may also have `train(model, data, context)`, a training loop of its own (`tasks.own_loop`).
    """

    version: str
    """The author increases it when clients with older code must no longer take part."""

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
