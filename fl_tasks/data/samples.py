"""Data that is read example by example: any map-style data set of torch, torchvision, Hugging Face or one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from algorithms.batches import Batch, to_device
from fl_tasks.data.examples import LabelRange
from fl_tasks.data.reading import Collate, Order, Reading
from fl_tasks.data.seeds import seeds_of_examples
from fl_tasks.errors import TaskError


@runtime_checkable
class MapStyle(Protocol):
    """A data set that gives an example by its number, as torch.utils.data.Dataset and datasets.Dataset do."""

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """One example: tensors, numbers, or a dict, tuple or list of them."""
        ...


@dataclass(frozen=True, eq=False)
class Samples:
    """A map-style data set, read in batches. It may be larger than the memory.

    The generators of torch (on the CPU), NumPy and Python are seeded before each example by round, client, epoch and
    position, so that augmentation has the same bits with any number of workers. A data set with `__getitems__`, such
    as datasets.Dataset, reads a batch in one call, seeded by its first example.
    """

    dataset: MapStyle
    collate: Collate | None = None
    """A list of examples -> a batch of any structure. None: torch's default, which stacks tensors and numbers of
    equal shape."""
    workers: int = 0
    """Processes that read ahead. They stay between rounds. With workers, data set and collate must be picklable."""
    pin_memory: bool = True
    """Workers' batches are copied to pinned memory where the training device is a GPU, for faster transfers."""
    prefetch: int = 2
    """Batches that each worker reads ahead."""
    device: torch.device = field(default=torch.device("cpu"), kw_only=True)
    """Device of the batches."""
    label_range: LabelRange | None = field(default=None, kw_only=True, repr=False)
    """The labels of batches are checked against it, if there is one: set where a task names its classes."""
    own_batches: ClassVar[int] = 0
    """The caller chooses the batches."""
    _reading: list[Reading] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.workers < 0 or self.prefetch < 1:
            raise TaskError(
                f"expected workers of 0 or more and prefetch of 1 or more, got {self.workers} and {self.prefetch}"
            )
        _check_map_style(self.dataset, stacked=self.collate is None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, which: Tensor | slice) -> Samples:
        """The examples at an index tensor, a mask or a slice, still unread; `samples[:0]` is empty."""
        chosen = torch.arange(len(self))[which]
        return replace(self, dataset=Subset(self.dataset, chosen.tolist()))  # type: ignore[arg-type] # any map-style data set

    def to(self, device: torch.device | str) -> Samples:
        """The same data set, whose batches are on a device."""
        return replace(self, device=torch.device(device))

    def read(self, batches: Iterator[Sequence[int]], seed: int, epoch: int = 0) -> Iterator[Batch]:
        """The batches with these positions, each on the device. Raises TaskError for an error in the task's code."""
        return self.read_epochs(((epoch, positions) for positions in batches), seed)

    def read_epochs(self, batches: Iterator[tuple[int, Sequence[int]]], seed: int) -> Iterator[Batch]:
        """The same for batches (epoch, positions): workers read ahead across the end of an epoch."""
        orders = (
            Order(positions, seeds_of_examples(seed, epoch, np.asarray(positions, dtype=np.int64)).tolist())
            for epoch, positions in batches
        )
        for batch in self._reader().batches(orders):
            yield to_device(batch if self.label_range is None else self.label_range.checked(batch), self.device)

    def close(self) -> None:
        """Stop the workers."""
        for reading in self._reading:
            reading.close()

    def _reader(self) -> Reading:
        if not self._reading:
            pinned = self.pin_memory and self.device.type == "cuda"
            self._reading.append(Reading(self.dataset, self.collate, self.workers, self.prefetch, pinned=pinned))
        return self._reading[0]


def _check_map_style(dataset: object, *, stacked: bool) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        raise TaskError(f"expected one data set, got a {kind} of {', '.join(map(str, dataset))}: choose one of them")
    if isinstance(dataset, tuple | str):
        raise TaskError(f"expected a data set, got a {kind}: for two tensors return Examples(inputs, targets)")
    if not isinstance(dataset, MapStyle):
        raise TaskError(
            f"expected Examples, a data set with __len__ and __getitem__, Samples or Batched, got {kind}: for an"
            " iterable of batches, such as a DataLoader, return Batched(make, length, examples), where make(seed)"
            " returns the batches of one epoch"
        )
    described = getattr(dataset, "format", None)
    if stacked and isinstance(described, Mapping) and described.get("type", "torch") is None:
        raise TaskError(
            f'the data set gives Python lists, not tensors: return dataset.with_format("torch") ({kind} of the'
            " datasets library), or Samples with a collate function"
        )
