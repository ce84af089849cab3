"""The state directory: one daemon at a time, one device for ever, one shard for ever."""

from __future__ import annotations

import os

import pytest
import torch

from fl_client.config import ClientConfig
from fl_client.data import load_local_task
from fl_client.errors import ConfigError, StateError
from fl_client.state import StateDir

CPU = torch.device("cpu")


def config(tmp_path, **shard):
    """A digits client with a shard."""
    return ClientConfig.model_validate(
        {
            "client_id": "edge-1",
            "server": "127.0.0.1:7070",
            "state_dir": tmp_path,
            "insecure": True,
            "task": {"name": "digits"},
            "shard": shard,
        }
    )


PARTITION = {"method": "iid", "clients": 10, "seed": 1}


def test_a_second_daemon_is_refused_and_told_who_holds_the_directory(tmp_path):
    """The message names the process that holds it."""
    with StateDir(tmp_path), pytest.raises(StateError, match=rf"held by another daemon, process {os.getpid()}"):
        StateDir(tmp_path).__enter__()


def test_a_directory_is_free_after_its_daemon(tmp_path):
    """The lock ends with its holder; the file that stays does not matter."""
    for _ in range(2):
        with StateDir(tmp_path) as state:
            assert state.path == tmp_path


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    """A file where the directory should be."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="state_dir: expected a directory that can be written"):
        StateDir(tmp_path / "file").__enter__()


def test_another_device_s_directory_is_refused(tmp_path):
    """What belongs to edge-1 is not used by edge-2."""
    with StateDir(tmp_path) as state:
        state.claim("edge-1")
        state.claim("edge-1")
        with pytest.raises(StateError, match="belongs to client 'edge-1', expected 'edge-2'"):
            state.claim("edge-2")


def test_a_shard_is_made_once(tmp_path):
    """A later start takes the indices that were kept, and does not make them again."""
    with StateDir(tmp_path) as state:
        assert state.shard({"index": 1}, lambda: [4, 7]) == [4, 7]
        assert state.shard({"index": 1}, lambda: [0]) == [4, 7]


def test_a_changed_shard_is_refused(tmp_path):
    """Asked for another index, the daemon says what it keeps and what is asked for."""
    with StateDir(tmp_path) as state:
        load_local_task(config(tmp_path, partition=PARTITION, index=1), state, CPU)
        with pytest.raises(StateError, match=r'"index": 1.* now asks for .*"index": 2'):
            load_local_task(config(tmp_path, partition=PARTITION, index=2), state, CPU)


def test_a_broken_state_file_is_told(tmp_path):
    """A file that is not ours is named, not overwritten."""
    (tmp_path / "shard.json").write_text("[1, 2")
    with StateDir(tmp_path) as state, pytest.raises(StateError, match=r"shard\.json: expected a file that this daemon"):
        state.shard({}, lambda: None)


def test_shards_of_a_partition_share_no_example(tmp_path):
    """Ten clients of an even partition: two of them hold a tenth each."""
    sizes = []
    for index in (0, 1):
        with StateDir(tmp_path / str(index)) as state:
            local = load_local_task(config(tmp_path, partition=PARTITION, index=index), state, CPU)
            sizes.append(local.offer().train_examples)
    whole = load_whole(tmp_path)
    assert all(abs(size - whole / 10) <= 1 for size in sizes)


def load_whole(tmp_path):
    """Examples in the training set."""
    with StateDir(tmp_path / "whole") as state:
        return load_local_task(config(tmp_path), state, CPU).offer().train_examples


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        ({"partition": PARTITION, "index": 10}, "shard.index: expected 0 to 9 of 10 clients, got 10"),
        ({"partition": {"method": "iid"}, "index": 0}, "shard.partition: expected method and clients"),
        ({"partition": {**PARTITION, "method": "odd"}, "index": 0}, "shard.partition: expected the partition method"),
        ({"file": "nowhere.json", "index": 0}, "nowhere.json cannot be read"),
        ({"folder": "mine"}, "folder"),
        ({"partition": {"method": "natural", "clients": 2}, "index": 0}, "give it a method train_groups()"),
    ],
)
def test_a_shard_that_cannot_be_made_is_told(tmp_path, shard, words):
    """The task's and the partition's own words reach the owner, and nothing is kept."""
    with StateDir(tmp_path) as state, pytest.raises(ConfigError) as caught:
        load_local_task(config(tmp_path, **shard), state, CPU)
    assert words in str(caught.value)
    assert not (tmp_path / "shard.json").exists()


def test_an_unknown_task_is_told(tmp_path):
    """A task that is not installed is a mistake of the configuration."""
    wrong = config(tmp_path).model_copy(update={"task": config(tmp_path).task.model_copy(update={"name": "digitz"})})
    with StateDir(tmp_path) as state, pytest.raises(ConfigError, match='Did you mean "digits"'):
        load_local_task(wrong, state, CPU)
