"""The benchmark of whole rounds in lockstep."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.lockstep import rounds
from fl_tasks.models import lenet


def test_a_setting_has_a_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two counted rounds of a small network: their seconds and the engine's choice as JSON, and the table."""
    monkeypatch.setattr(rounds, "SETTINGS", {"small": rounds.Setting(lenet, 2, 4, 2, 1, ("fedavg",))})
    threads = torch.get_num_threads()
    rounds.main(["--rounds", "2"])
    torch.set_num_threads(threads)
    first, *table = capsys.readouterr().out.splitlines()
    found = json.loads(first)
    assert (found["setting"], len(found["seconds"])) == ("small", 2)
    assert found["engine"].startswith("lockstep: groups of at most ")
    assert [row.count("|") for row in table] == [5, 5, 5]
