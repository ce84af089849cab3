"""Partitions as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fl_tasks import Partition, PartitionSpec, TaskError, load_partition, make_partition, save_partition
from fl_tasks.partitioning.file import _digest


@pytest.fixture
def partition(labels: Tensor) -> Partition:
    """1,000 examples over four clients."""
    spec = PartitionSpec("dirichlet", 4, seed=2, alpha=0.5)
    return Partition(spec, len(labels), make_partition(spec, labels))


@pytest.fixture
def saved(partition: Partition, tmp_path: Path) -> Path:
    """The partition in a file."""
    save_partition(tmp_path / "split.json", partition)
    return tmp_path / "split.json"


def test_a_saved_partition_is_read_back(partition: Partition, saved: Path) -> None:
    """Spec, size and every index are what was saved, and nothing else is left in the folder."""
    loaded = load_partition(saved, 1000)
    assert (partition.spec, 1000) == (loaded.spec, loaded.num_examples)
    assert all(map(torch.equal, partition.parts, loaded.parts))
    assert [saved] == list(saved.parent.iterdir())


def test_an_older_file_has_the_defaults(saved: Path) -> None:
    """A file with no fields after alpha loads with their defaults."""
    data = json.loads(saved.read_text())
    data["spec"] = {"method": "dirichlet", "clients": 4, "seed": 2, "alpha": 0.5}
    data["digest"] = _digest({key: data[key] for key in ("spec", "num_examples", "parts")})
    saved.write_text(json.dumps(data))
    assert load_partition(saved, 1000).spec == PartitionSpec("dirichlet", 4, seed=2, alpha=0.5)


def test_a_client_finds_its_shard(partition: Partition) -> None:
    """Client 3 of 4 is the last; 4 and -1 are refused."""
    assert partition.shard(3).indices is partition.parts[3]
    for client in (4, -1):
        with pytest.raises(TaskError, match=f"a client from 0 to 3 of this partition, got {client}"):
            partition.shard(client)


def test_a_partition_of_other_data_is_refused(saved: Path) -> None:
    """The number of training examples must be that of the partition."""
    with pytest.raises(TaskError, match="is for 1000 examples, the training set has 999"):
        load_partition(saved, 999)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not whole JSON"),
        ("[]", "got 'list'"),
        ("{}", 'of format "impetus-partition-1" in .*, got None'),
        ('{"format": "impetus-partition-1"}', "changed or cut"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    """The message has the file and the expected content."""
    path = tmp_path / "split.json"
    path.write_text(content)
    with pytest.raises(TaskError, match=message):
        load_partition(path, 1000)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The path and the reason are in the message."""
    with pytest.raises(TaskError, match=r"nowhere\.json cannot be read: No such file"):
        load_partition(tmp_path / "nowhere.json", 1000)


def test_an_edited_file_is_refused(saved: Path) -> None:
    """One index changed by hand no longer fits the digest."""
    data = json.loads(saved.read_text())
    data["parts"][0][0] += 1
    saved.write_text(json.dumps(data))
    with pytest.raises(TaskError, match="its digest differs"):
        load_partition(saved, 1000)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[0, 1], [1000]], "names examples 0 to 1000, outside 0 to 999"),
        ([[0, -1], [2]], "names examples -1 to 2"),
        ([[0, 1], [1]], "to more than one client"),
        ([[0]], "has 1 parts for 2 clients"),
    ],
)
def test_a_wrong_partition_is_refused_though_its_digest_fits(
    tmp_path: Path, parts: list[list[int]], message: str
) -> None:
    """An invalid partition with a matching digest is refused when it is loaded."""
    wrong = Partition(PartitionSpec("iid", 2), 1000, [torch.tensor(part) for part in parts])
    save_partition(tmp_path / "split.json", wrong)
    with pytest.raises(TaskError, match=message):
        load_partition(tmp_path / "split.json", 1000)


def test_a_partition_by_an_unknown_method_is_refused(saved: Path) -> None:
    """A file of a later release is refused with the unknown part."""
    data = json.loads(saved.read_text())
    data["spec"]["method"] = "lottery"
    data["digest"] = _digest({key: data[key] for key in ("spec", "num_examples", "parts")})
    saved.write_text(json.dumps(data))
    with pytest.raises(TaskError, match=r'cannot be used: expected the partition method .* got "lottery"'):
        load_partition(saved, 1000)
