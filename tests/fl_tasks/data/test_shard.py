"""Shards of data sets, and what a query may return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from fl_tasks import Batched, Samples, Shard, TaskError
from fl_tasks.data.shard import checked_shard
from tests.fl_tasks.data.sets import Drawn

SOME = Shard(torch.tensor([4, 2]))


def test_a_shard_of_a_data_set_is_a_subset() -> None:
    """It is not read; without indices the data set itself is returned."""
    part = SOME.of(Drawn())
    assert isinstance(part, Subset)
    assert [int(part[at]["index"]) for at in range(2)] == [4, 2]
    whole = Drawn()
    assert Shard().of(whole) is whole
    assert len(SOME.of(Samples(Drawn(), workers=3))) == 2
    assert SOME.of(Samples(Drawn(), workers=3)).workers == 3


def test_indices_outside_a_data_set_are_refused() -> None:
    """As for examples in memory."""
    with pytest.raises(TaskError, match="expected indices from 0 to 9, got 4 to 10"):
        Shard(torch.tensor([4, 10])).of(Drawn())


def test_batches_cannot_be_selected_from() -> None:
    """Indices refer to examples."""
    with pytest.raises(TaskError, match="select before batches are made"):
        SOME.of(Batched(lambda seed: [], 0, 0))  # type: ignore[call-overload] # refused


@pytest.mark.parametrize(
    "result", [[4, 2], (4, 2), np.array([4, 2]), torch.tensor([4, 2]), torch.tensor([4, 2], dtype=torch.int32)]
)
def test_a_query_may_return_indices(result: Any) -> None:
    """Whole numbers in any usual form."""
    indices = checked_shard(result).indices
    assert indices is not None
    assert (indices.tolist(), indices.dtype) == ([4, 2], torch.int64)


def test_a_query_may_return_a_folder_or_rows() -> None:
    """A path is a folder; anything else is for the task, and a task that needs indices refuses it."""
    assert checked_shard(Path("photos")).folder == Path("photos")
    rows = [("a", 1), ("b", 2)]
    assert checked_shard(rows).rows is rows
    assert checked_shard([True, False]).rows == [True, False]
    with pytest.raises(TaskError, match=r"examples with some indices, got rows of type list.*shard\.rows"):
        checked_shard(rows).of(Drawn())
    with pytest.raises(TaskError, match="got None"):
        checked_shard(None)
