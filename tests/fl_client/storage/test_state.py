"""The state directory: one daemon at a time, and always the same device and shard."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_client.errors import ConfigError, StateError
from fl_client.settings.config import ClientConfig
from fl_client.storage.state import StateDir
from fl_client.training.data import load_local_task

CPU = torch.device("cpu")


def config(tmp_path: Path, **shard: Any) -> ClientConfig:
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


def test_a_second_daemon_is_refused_with_the_holder(tmp_path: Path) -> None:
    """The message names the process that holds it."""
    with StateDir(tmp_path), pytest.raises(StateError, match=rf"held by another daemon, process {os.getpid()}"):
        StateDir(tmp_path).__enter__()


def test_a_directory_is_free_after_its_daemon(tmp_path: Path) -> None:
    """The lock ends with its holder. The remaining file has no effect."""
    for _ in range(2):
        with StateDir(tmp_path) as state:
            assert state.path == tmp_path


def test_a_directory_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    """A file in place of the directory is reported."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="state_dir: expected a directory that can be written"):
        StateDir(tmp_path / "file").__enter__()


def test_another_device_s_directory_is_refused(tmp_path: Path) -> None:
    """edge-2 does not use the directory of edge-1."""
    with StateDir(tmp_path) as state:
        state.claim("edge-1")
        state.claim("edge-1")
        with pytest.raises(StateError, match="belongs to client 'edge-1', expected 'edge-2'"):
            state.claim("edge-2")


def test_a_shard_is_made_once(tmp_path: Path) -> None:
    """A later start uses the stored indices and does not compute them again."""
    with StateDir(tmp_path) as state:
        assert state.shard({"index": 1}, lambda: [4, 7]) == [4, 7]
        assert state.shard({"index": 1}, lambda: [0]) == [4, 7]


def test_a_changed_shard_is_refused(tmp_path: Path) -> None:
    """With another index configured, the message names the saved shard and the configured one."""
    with StateDir(tmp_path) as state:
        load_local_task(config(tmp_path, partition=PARTITION, index=1), state, CPU)
        with pytest.raises(StateError, match=r'"index": 1.* the configuration has .*"index": 2'):
            load_local_task(config(tmp_path, partition=PARTITION, index=2), state, CPU)


def test_a_broken_state_file_is_an_error(tmp_path: Path) -> None:
    """An unknown file is named and not overwritten."""
    (tmp_path / "shard.json").write_text("[1, 2")
    with StateDir(tmp_path) as state, pytest.raises(StateError, match=r"shard\.json: expected a file that this daemon"):
        state.shard({}, lambda: None)


def test_shards_of_a_partition_share_no_example(tmp_path: Path) -> None:
    """Ten clients of an even partition: two of them hold a tenth each."""
    sizes = []
    for index in (0, 1):
        with StateDir(tmp_path / str(index)) as state:
            local = load_local_task(config(tmp_path, partition=PARTITION, index=index), state, CPU)
            sizes.append(local.offer().train_examples)
    whole = load_whole(tmp_path)
    assert all(abs(size - whole / 10) <= 1 for size in sizes)


def load_whole(tmp_path: Path) -> Any:
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
def test_a_shard_that_cannot_be_made_is_an_error(tmp_path: Path, shard: dict[str, Any], words: str) -> None:
    """The message has the error of the task or the partition, and nothing is stored."""
    with StateDir(tmp_path) as state, pytest.raises(ConfigError) as caught:
        load_local_task(config(tmp_path, **shard), state, CPU)
    assert words in str(caught.value)
    assert not (tmp_path / "shard.json").exists()


def test_an_unknown_task_is_reported(tmp_path: Path) -> None:
    """A task that is not installed is a configuration error."""
    right = config(tmp_path)
    assert right.task is not None
    wrong = right.model_copy(update={"task": right.task.model_copy(update={"name": "digitz"})})
    with StateDir(tmp_path) as state, pytest.raises(ConfigError, match='Did you mean "digits"'):
        load_local_task(wrong, state, CPU)


def test_a_directory_that_vanished_is_made_again_with_its_contents(tmp_path: Path) -> None:
    """Identity and shard are the same, and the lock is held in the new directory."""
    folder = tmp_path / "state"
    with StateDir(folder) as state:
        state.claim("edge-1")
        state.shard({"index": 0}, lambda: [3, 1])
        before = {name: (folder / name).read_bytes() for name in ("identity.json", "shard.json")}
        shutil.rmtree(folder)
        assert not state.is_whole()
        state.make_again()
        assert state.is_whole()
        assert {name: (folder / name).read_bytes() for name in before} == before
        with pytest.raises(StateError, match="held by another daemon"):
            StateDir(folder).__enter__()


def test_a_directory_that_another_daemon_has_now_is_left_to_it(tmp_path: Path) -> None:
    """Deleted and taken by a second daemon: this one does not write there, and gets it back afterwards."""
    folder = tmp_path / "state"
    with StateDir(folder) as first:
        first.claim("edge-1")
        shutil.rmtree(folder)
        with StateDir(folder) as second:
            second.claim("edge-1")
            with pytest.raises(StateError, match="held by another daemon"):
                first.make_again()
        first.make_again()
        assert first.is_whole()


def test_another_devices_directory_in_its_place_is_refused(tmp_path: Path) -> None:
    """A directory with another identity is not used."""
    folder = tmp_path / "state"
    with StateDir(folder) as first:
        first.claim("edge-1")
        shutil.rmtree(folder)
        with StateDir(folder) as second:
            second.claim("edge-2")
        with pytest.raises(StateError, match="another device or shard"):
            first.make_again()
