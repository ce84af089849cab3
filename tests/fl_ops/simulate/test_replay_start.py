"""The file that a replayed run started from: found, and proved by its digest."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3

from fl_ops.errors import UsageError
from fl_ops.simulate.replay import ReplayRequest, with_initial_model
from fl_ops.simulate.settings import parse_simulation
from fl_server.run_settings.spec import from_values

TASK = {"task": {"name": "digits"}}


def test_a_replay_uses_the_file_that_the_run_started_from(tmp_path: Path) -> None:
    """The copy in the state directory, or the file of this machine's configuration; another file is refused."""
    kept = tmp_path / "state" / "checkpoints" / "run-r" / "start.safetensors"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"model")
    run = from_values({**TASK, "initial_model": f"blake3:{blake3(b'model').hexdigest()}"})
    bare, config = parse_simulation(TASK), tmp_path / "run.toml"
    request = ReplayRequest("r", tmp_path / "state", config, None)
    assert with_initial_model(run, bare, request).initial_model == str(kept)
    assert with_initial_model(from_values(TASK), bare, request).initial_model == ""
    database = ReplayRequest("r", "postgresql://x", config, None)
    with pytest.raises(UsageError, match="set initial_model in .*run.toml to its path"):
        with_initial_model(run, bare, database)
    own = parse_simulation({**TASK, "initial_model": str(kept)})
    assert with_initial_model(run, own, database).initial_model == str(kept)
    kept.write_bytes(b"another")
    with pytest.raises(UsageError, match="expected the file that the run started from, blake3:"):
        with_initial_model(run, bare, request)
