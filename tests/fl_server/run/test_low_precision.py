"""A run with a model of low precision continues with its master after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fl_server.harness import TASK
from tests.fl_server.killed_runs import run_with_kill


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedcm", "fedadam"])
async def test_a_kill_at_every_save_and_commit_changes_no_bit(tmp_path: Path, method: str) -> None:
    """Four rounds. What a round adds is below the model's precision, so a lost master would show in the models."""
    sections: dict[str, Any] = {
        "task": {"name": TASK, "options": {"model": "bfloat16"}},
        "algorithm": {"name": method},
        "stop": {"rounds": 4},
    }
    undisturbed, _, writes = await run_with_kill(tmp_path / "undisturbed", **sections)
    places = [at for at, name in enumerate(writes, start=1) if name in {"save", "commit"}]
    for dies_at in places[3::2]:
        outcome, _, _ = await run_with_kill(tmp_path / f"{dies_at}", dies_at, **sections)
        assert outcome == undisturbed
