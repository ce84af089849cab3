"""The device's part of a task's data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fl_client.errors import ConfigError
from fl_client.settings.config import ClientConfig
from fl_client.storage.state import StateDir
from fl_client.training.data import load_local_task


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
