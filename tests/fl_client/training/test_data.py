"""The device's part of a task's data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from fl_client.errors import ConfigError
from fl_client.settings.config import ClientConfig
from fl_client.storage.state import StateDir
from fl_client.training import data
from fl_client.training.data import LocalTask, load_local_task


def test_a_shard_counts_in_the_whole_training_set(tmp_path: Path) -> None:
    """Its indices refer to the whole set even if the task keeps a part of every shard for evaluation.

    1,437 scans partitioned among 4 clients are 359 for each; floor(0.2 * 359) = 71 of them are held out.
    """
    config = ClientConfig.model_validate(
        {
            "client_id": "edge-1", "server": "127.0.0.1:7070", "state_dir": str(tmp_path), "insecure": True,
            "task": {"name": "digits", "options": {"client_eval_fraction": 0.2}},
            "shard": {"partition": {"method": "dirichlet", "clients": 4, "seed": 1}, "index": 3},
        }
    )  # fmt: skip
    with StateDir(tmp_path) as state:
        local = load_local_task(config, state, torch.device("cpu"))
    assert (len(local.train), len(local.held_out)) == (288, 71)


def test_a_shard_of_no_examples_is_refused_at_the_start(tmp_path: Path) -> None:
    """The daemon does not offer a task that it cannot train on."""
    config = ClientConfig.model_validate(
        {
            "client_id": "edge-1", "server": "127.0.0.1:7070", "state_dir": str(tmp_path), "insecure": True,
            "task": {"name": "tests.processes.tiny_task:Tiny", "options": {"kept": 192}},
        }
    )  # fmt: skip
    with (
        StateDir(tmp_path) as state,
        pytest.raises(ConfigError, match="expected at least one training example in this"),
    ):
        load_local_task(config, state, torch.device("cpu"))


def configured(directory: Path, **shard: Any) -> ClientConfig:
    """A daemon of the task with sequences."""
    return ClientConfig.model_validate(
        {
            "client_id": "edge-1", "server": "127.0.0.1:7070", "state_dir": str(directory / "state"), "insecure": True,
            "task": {"name": "tests.processes.sequence_task:Counting"}, "shard": shard,
        }
    )  # fmt: skip


def loaded(config: ClientConfig) -> LocalTask:
    """The task with its data, as at a start of the daemon."""
    with StateDir(config.state_dir) as state:
        return load_local_task(config, state, torch.device("cpu"))


def test_an_index_file_is_kept_from_the_first_start_on(tmp_path: Path) -> None:
    """A later change of the file has no effect, as for a partition."""
    (tmp_path / "mine.txt").write_text("3\n5\n7\n")
    config = configured(tmp_path, indices=str(tmp_path / "mine.txt"))
    assert len(loaded(config).train) == 3
    (tmp_path / "mine.txt").write_text("3\n")
    assert len(loaded(config).train) == 3


QUERY = """
from pathlib import Path

def mine():
    return list(range(int(Path(__file__).with_name("n").read_text())))
"""


def test_a_query_is_called_at_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start has the examples that the function then returns."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "my_query.py").write_text(QUERY)
    config = configured(tmp_path, query="my_query:mine")
    for number in ("4", "6"):
        (tmp_path / "n").write_text(number)
        assert loaded(config).offer().train_examples == 6 - (number == "4") * 2


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        ({"query": "sys:argv"}, "expected a function at sys:argv, got list"),
        ({"query": "os:getcwd"}, "examples with some indices, got rows of type str"),
        ({"query": "os:abort_mission"}, "has no attribute abort_mission"),
        ({"query": "math:sqrt"}, "the query math:sqrt raised TypeError"),
        ({"indices": "/nonexistent/mine.txt"}, "the index file /nonexistent/mine.txt cannot be read"),
        ({"partition": {"method": "shards", "clients": 2}, "index": 0}, r"add a method train_labels\(\)"),
        ({"partition": {"method": "natural", "clients": 2}, "index": 0}, "train_groups"),
    ],
    ids=["no function", "rows", "no attribute", "raises", "no file", "classes", "groups"],
)
def test_shards_that_cannot_be_had_are_refused_at_the_start(
    tmp_path: Path, shard: dict[str, Any], expected: str
) -> None:
    """The message names the setting's file or function, or the method that the task must have."""
    with pytest.raises(ConfigError, match=expected):
        loaded(configured(tmp_path, **shard))


@pytest.mark.parametrize("query", ["my_data", "my data:mine", ":mine", "my_data:"])
def test_a_query_is_a_function_of_a_module(tmp_path: Path, query: str) -> None:
    """Anything else is refused before it is imported."""
    with pytest.raises(ValueError, match="expected module:attribute of an installed module"):
        configured(tmp_path, query=query)


def test_one_source_of_a_shard(tmp_path: Path) -> None:
    """Two of them contradict each other."""
    with pytest.raises(ValueError, match="expected one of partition, file, indices, folder and query, got folder and"):
        configured(tmp_path, folder="photos", query="a:b")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00", b"PK\x03\x04aaaa", b"[" * 100_000, bytes(range(256))])
@pytest.mark.parametrize("shard", [{"indices": "mine.npy"}, {"indices": "mine.txt"}, {"file": "mine", "index": 0}])
def test_a_broken_file_of_the_shard_is_named(tmp_path: Path, content: bytes, shard: dict[str, Any]) -> None:
    """Whatever it has in it: an index file as text or of NumPy, and a partition."""
    (key, name), *others = shard.items()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        loaded(configured(tmp_path, **{key: str(tmp_path / name), **dict(others)}))


def test_a_byte_order_mark_is_no_number(tmp_path: Path) -> None:
    """An index file that an editor on Windows has saved."""
    (tmp_path / "mine.txt").write_bytes(b"\xef\xbb\xbf3\r\n5\r\n")
    assert len(loaded(configured(tmp_path, indices=str(tmp_path / "mine.txt"))).train) == 2


def test_a_start_that_takes_long_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that does not end: the log has the line of the task's code, again and again."""
    monkeypatch.setattr(data, "FIRST_S", 0.01)
    with capture_logs() as lines, data.slow_start_logged("mine:Task"):
        while len(lines) < 2:
            pass
    assert [line["event"] for line in lines[:2]] == ["task_still_loading"] * 2
    assert "test_data.py, line " in lines[0]["place"]
