"""The device's part of a task's data."""

from __future__ import annotations

import torch

from fl_client.config import ClientConfig
from fl_client.data import load_local_task
from fl_client.state import StateDir


def test_a_shard_counts_in_the_whole_training_set(tmp_path):
    """Also where the task keeps a part of every shard from training.

    1,437 scans dealt to 4 clients are 359 for each, of which floor(0.2 * 359) = 71 are held out.
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
