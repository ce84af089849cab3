"""Engines of a comparison: what changes the numbers makes other cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_ops.compare.cells import Cell, CellResult
from fl_ops.compare.plan import Plan
from fl_ops.simulate.engine_choice import EngineRequest
from tests.fl_ops.compare.conftest import Read
from tests.fl_ops.conftest import Fl

LOCKSTEP = ("--engine", "batched")
LOWER = (*LOCKSTEP, "--precision", "bfloat16")


@pytest.mark.slow
def test_precision_makes_other_cells(read: Read, tmp_path: Path, fl: Fl) -> None:
    """A comparison in bfloat16 is done, and neither the one in float32 nor the sequential one has a cell of it."""
    read(("seeds = [1, 2]", "seeds = [1]"), ("rounds = 3", "rounds = 1"), ("0.1, 0.2, 0.4", "0.1"))
    arguments = ("compare", tmp_path / "small.toml", "--out", tmp_path / "out", "--only", "FedAvg", "--json")

    def cells(*options: str) -> tuple[int, int]:
        done = fl(*arguments, *options)
        assert done.exit_code == 0, done.output
        facts: dict[str, Any] = json.loads(done.stdout)
        return facts["cells_done"], facts["cells_left"]

    assert cells(*LOWER) == (2, 0)
    assert cells("--no-run", *LOWER) == (2, 0)
    assert cells("--no-run", *LOCKSTEP) == (0, 2)
    assert cells("--no-run") == (0, 2)


def test_precision_needs_lockstep(read: Read, tmp_path: Path, fl: Fl) -> None:
    """The error names the option and the engine."""
    read()
    done = fl("compare", tmp_path / "small.toml", "--precision", "bfloat16")
    assert (done.exit_code, "--precision: expected --engine batched" in done.stderr) == (2, True)


def test_gpus_of_one_model_have_the_same_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a GPU is not part of a cell, its model is."""
    models = ["A", "A", "B"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(models))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: models[device.index])
    first, second, third = (
        EngineRequest("batched", device=f"cuda:{number}").options().arithmetic for number in range(3)
    )
    clients = {"clients": "in lockstep", "strategy": None, "group": 0, "precision": "float32"}
    assert first == second == {**clients, "device": "cuda", "gpu": "A"}
    assert third["gpu"] == "B"


def test_the_engine_of_one_client_at_a_time_is_no_setting(read: Read) -> None:
    """So finished cells keep their names, which are a format: a change of the digest here loses results."""

    def none(_: Cell) -> CellResult | None:
        return None

    assert {*Plan(read(), none).missing()[0].settings} == {"run", "simulation"}
    settings = {"simulation": {"clients": 4}, "run": {"seed": 1, "local": {"learning_rate": 0.1}}}
    assert Cell("any", "even", "final", 1, settings).digest == "811c87903d8ff0cbc83556b926affef3"
