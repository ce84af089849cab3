"""A client's part of a task's data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.utils.data import Subset

from fl_tasks.data.batched import Batched
from fl_tasks.data.examples import Examples
from fl_tasks.data.samples import MapStyle, Samples
from fl_tasks.errors import TaskError

Selectable = TypeVar("Selectable", Examples, Samples)


@dataclass(frozen=True)
class Shard:
    """A client's part of a task's data: indices into the task's training set, or data that only this device has.

    With none of them, it is the whole training set.
    """

    indices: Tensor | None = None
    folder: Path | None = None
    """A folder with files of its own."""
    rows: Any = None
    """What the query function of this device's settings returned, if these are not indices."""

    @overload
    def of(self, examples: Selectable) -> Selectable: ...

    @overload
    def of(self, examples: MapStyle) -> Any: ...

    def of(self, examples: Any) -> Any:
        """The examples at the indices, or all of them without indices. They stay unread in a data set.

        examples: Examples, Samples, or a map-style data set, of which a torch.utils.data.Subset is returned.

        Raises TaskError for an index out of range, and for a folder and rows: only the task can read them.
        """
        if self.folder is not None:
            raise TaskError(
                "this task brings its own data, of which a device gets a part by [shard] partition, got the folder"
                f" {self.folder}: remove the folder, or let the task read shard.folder"
            )
        if self.rows is not None:
            raise TaskError(
                "this task brings its own data, of which a device gets the examples with some indices, got rows of type"
                f" {type(self.rows).__name__} from the query: let the query return indices, or let the task read"
                " shard.rows"
            )
        if isinstance(examples, Batched):
            raise TaskError("expected data to select indices from, got Batched: select before batches are made")
        if self.indices is None:
            return examples
        indices = checked_indices(self.indices, len(examples))
        return examples[indices] if isinstance(examples, Examples | Samples) else Subset(examples, indices.tolist())


def checked_indices(indices: Tensor, size: int) -> Tensor:
    """The same indices. Raises TaskError unless each is from 0 to size - 1."""
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        raise TaskError(
            f"expected indices from 0 to {size - 1}, got {int(indices.min())} to"
            f" {int(indices.max())}: the partition was made for other data"
        )
    return indices


def checked_shard(result: Any) -> Shard:
    """The shard that a query's result describes: indices, a folder, or rows. Raises TaskError for None."""
    if result is None:
        raise TaskError("expected the query to return indices, a folder or rows, got None: does it lack a return?")
    if isinstance(result, Shard):
        return result
    if isinstance(result, Path):
        return Shard(folder=result)
    return Shard(rows=result) if (indices := _as_indices(result)) is None else Shard(indices)


def _as_indices(result: Any) -> Tensor | None:
    """Whole numbers in a list, tuple, range, array or tensor, in order; None for anything else."""
    if isinstance(result, list | tuple | range):
        whole = len(result) > 0 and all(isinstance(index, int) and not isinstance(index, bool) for index in result)
        return torch.tensor(list(result), dtype=torch.int64) if whole else None
    if not isinstance(result, Tensor):
        if type(result).__module__ != "numpy" or not hasattr(result, "dtype") or result.dtype.kind not in "iu":
            return None
        result = torch.as_tensor(result.astype("int64"))
    whole = result.dim() == 1 and not result.is_floating_point() and result.dtype != torch.bool
    return result.to(torch.int64) if whole else None
