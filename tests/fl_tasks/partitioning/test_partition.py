"""What a partition needs of a task, and how a refusal names the method to add."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_tasks import (
    Examples,
    PartitionSpec,
    Samples,
    Shard,
    TaskError,
    make_partition,
    partition_task,
    training_labels,
    training_size,
)
from fl_tasks.partitioning.file import load_indices
from tests.fl_tasks.data.sets import Drawn

SEQUENCES = Examples(torch.zeros(8, 5), torch.zeros(8, 5, dtype=torch.int64))


def task(data: Any, **methods: Any) -> Any:
    """An object with these methods of a task."""

    def train_data(shard: Shard) -> Any:
        if isinstance(data, Exception):
            raise data
        return data

    return type(
        "Some", (), {"train_data": staticmethod(train_data), **{k: staticmethod(v) for k, v in methods.items()}}
    )


@pytest.mark.parametrize("data", [SEQUENCES, Samples(Drawn()), Drawn()], ids=["sequences", "samples", "data set"])
def test_a_random_partition_needs_no_labels(data: Any) -> None:
    """Data without classes is partitioned at random, with the bits of data with classes."""
    spec = PartitionSpec("iid", 3, sigma=0.5)
    parts = partition_task(spec, task(data))
    expected = make_partition(spec, torch.arange(len(data)) % 2)
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]


def test_a_natural_partition_needs_groups_only() -> None:
    """Four groups of two sequences for four clients."""
    parts = partition_task(PartitionSpec("natural", 4), task(SEQUENCES, train_groups=lambda: torch.arange(8) // 2))
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_without_a_number_each_group_is_a_client() -> None:
    """A natural partition of three groups has three clients; other methods need a number."""
    spec = PartitionSpec("natural")
    parts = partition_task(spec, task(SEQUENCES, train_groups=lambda: torch.tensor([0, 0, 5, 5, 5, 2, 2, 2])))
    assert [part.tolist() for part in parts] == [[0, 1], [5, 6, 7], [2, 3, 4]]
    with pytest.raises(TaskError, match='expected 1 or more clients, got 0: only the method "natural"'):
        PartitionSpec("iid")


@pytest.mark.parametrize("spec", [PartitionSpec("dirichlet", 2), PartitionSpec("iid", 2, stratified=True)])
@pytest.mark.parametrize("data", [SEQUENCES, Drawn()], ids=["sequences", "data set"])
def test_a_partition_by_class_names_the_method_to_add(spec: PartitionSpec, data: Any) -> None:
    """The message names train_labels, and the methods that work without."""
    with pytest.raises(TaskError, match=r'add a method train_labels\(\).*choose the partition method "iid"'):
        partition_task(spec, task(data))


def test_natural_without_groups_names_the_method_to_add() -> None:
    """The message names train_groups."""
    with pytest.raises(TaskError, match="train_groups"):
        partition_task(PartitionSpec("natural", 2), task(SEQUENCES))


def test_a_task_that_cannot_give_all_data_names_the_method_to_add() -> None:
    """A task whose data lies in folders on the devices cannot make the whole set; the message names train_size."""
    folders = task(AttributeError("'NoneType' has no attribute 'glob'"))
    with pytest.raises(TaskError, match=r"number of training examples.*Add a method train_size\(\) -> int"):
        training_size(folders)
    with pytest.raises(TaskError, match=r"class of each example.*Add a method train_labels\(\)"):
        training_labels(folders)


def test_the_size_comes_from_the_cheapest_source() -> None:
    """train_size, then labels, then groups, then the data."""
    never = AssertionError("the data was loaded")
    assert training_size(task(never, train_size=lambda: 5, train_labels=lambda: [0] * 4)) == 5
    assert training_size(task(never, train_labels=lambda: torch.zeros(4), train_groups=lambda: [1] * 3)) == 4
    assert training_size(task(never, train_groups=lambda: [1] * 3)) == 3
    assert training_size(task(SEQUENCES)) == 8
    with pytest.raises(TaskError, match=r"expected train_size\(\) to return .*, got '5'"):
        training_size(task(never, train_size=lambda: "5"))


class Targets(Drawn):
    """A data set with the classes of its examples, as those of torchvision have them."""

    targets = [0, 1] * 5


def test_targets_of_a_data_set_are_its_labels() -> None:
    """torchvision's folders need no train_labels."""
    assert training_labels(task(Targets())).tolist() == [0, 1] * 5


@pytest.mark.parametrize("name", ["mine.txt", "mine.npy"])
def test_an_index_file(tmp_path: Path, name: str) -> None:
    """Whole numbers, one a line, or an array; sorted."""
    path = tmp_path / name
    if name.endswith("npy"):
        np.save(path, np.array([5, 1, 3], dtype=np.int32))
    else:
        path.write_text("5\n1\n3\n")
    assert load_indices(path, 6).tolist() == [1, 3, 5]
    with pytest.raises(TaskError, match="expected indices from 0 to 4, got 1 to 5"):
        load_indices(path, 5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1\n2.5\n", "expected whole numbers, one a line"),
        ("", "got int64 of shape"),
        ("1\n1\n", "names an example more than once"),
        (None, "cannot be read: No such file"),
        ("99999999999999999999999\n", "expected whole numbers, one a line"),
    ],
)
def test_a_bad_index_file_is_refused(tmp_path: Path, text: str | None, expected: str) -> None:
    """The message has the path and the reason."""
    path = tmp_path / "mine.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TaskError, match=expected):
        load_indices(path, 6)


def test_an_index_file_is_not_unpickled(tmp_path: Path) -> None:
    """An array of objects would be a pickle."""
    path = tmp_path / "mine.npy"
    np.save(path, np.array([{}, {}]), allow_pickle=True)
    with pytest.raises(TaskError, match="expected whole numbers"):
        load_indices(path, 6)
