"""Partitions as files."""

import json

import pytest
import torch

from tasks import Partition, PartitionSpec, TaskError, load_partition, make_partition, save_partition
from tasks.partition_file import _digest


@pytest.fixture
def partition(labels):
    """1,000 examples over four clients."""
    spec = PartitionSpec("dirichlet", 4, seed=2, alpha=0.5)
    return Partition(spec, len(labels), make_partition(spec, labels))


@pytest.fixture
def saved(partition, tmp_path):
    """The partition in a file."""
    save_partition(tmp_path / "split.json", partition)
    return tmp_path / "split.json"


def test_a_saved_partition_comes_back(partition, saved):
    """Spec, size and every index are what was saved, and nothing else is left in the folder."""
    loaded = load_partition(saved, 1000)
    assert (partition.spec, 1000) == (loaded.spec, loaded.num_examples)
    assert all(map(torch.equal, partition.parts, loaded.parts))
    assert [saved] == list(saved.parent.iterdir())


def test_a_file_of_before_has_the_defaults(saved):
    """A partition made when there were no more fields than alpha loads as the spec that it was."""
    data = json.loads(saved.read_text())
    data["spec"] = {"method": "dirichlet", "clients": 4, "seed": 2, "alpha": 0.5}
    data["digest"] = _digest({key: data[key] for key in ("spec", "num_examples", "parts")})
    saved.write_text(json.dumps(data))
    assert load_partition(saved, 1000).spec == PartitionSpec("dirichlet", 4, seed=2, alpha=0.5)


def test_a_client_finds_its_shard(partition):
    """Client 3 of 4 is the last; 4 and -1 are refused."""
    assert torch.equal(partition.parts[3], partition.shard(3).indices)
    for client in (4, -1):
        with pytest.raises(TaskError, match=f"a client from 0 to 3 of this partition, got {client}"):
            partition.shard(client)


def test_a_partition_of_other_data_is_refused(saved):
    """The number of training examples must be the one that was dealt."""
    with pytest.raises(TaskError, match="deals 1000 examples, the training set has 999"):
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
def test_another_file_is_refused(tmp_path, content, message):
    """What is no partition is named, with what was expected."""
    path = tmp_path / "split.json"
    path.write_text(content)
    with pytest.raises(TaskError, match=message):
        load_partition(path, 1000)


def test_a_missing_file_is_named(tmp_path):
    """The path and the reason are in the message."""
    with pytest.raises(TaskError, match=r"nowhere\.json cannot be read: No such file"):
        load_partition(tmp_path / "nowhere.json", 1000)


def test_an_edited_file_is_refused(saved):
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
def test_a_wrong_partition_is_refused_though_its_digest_fits(tmp_path, parts, message):
    """A program that saves nonsense is caught when it is loaded."""
    wrong = Partition(PartitionSpec("iid", 2), 1000, [torch.tensor(part) for part in parts])
    save_partition(tmp_path / "split.json", wrong)
    with pytest.raises(TaskError, match=message):
        load_partition(tmp_path / "split.json", 1000)


def test_a_partition_by_an_unknown_method_is_refused(saved):
    """A file of a later release says which part of it is not understood."""
    data = json.loads(saved.read_text())
    data["spec"]["method"] = "lottery"
    data["digest"] = _digest({key: data[key] for key in ("spec", "num_examples", "parts")})
    saved.write_text(json.dumps(data))
    with pytest.raises(TaskError, match=r'cannot be used: expected the partition method .* got "lottery"'):
        load_partition(saved, 1000)
