"""examples/pretraining: its run on a small text, and the settings of its pages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fl_client.settings.config import ClientConfig
from fl_ops.simulate.output.results import SeedResult
from fl_ops.simulate.seeds import Job, Report, simulate
from fl_ops.simulate.settings import parse_simulation
from fl_server.run_settings.config import RunConfig
from fl_server.settings.config import ServerConfig
from tests.fl_tasks.built_in.plays import write_play

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "pretraining"


def blocks(page: Path) -> list[dict[str, Any]]:
    """The TOML blocks of a page."""
    return [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.mark.slow
def test_the_example_learns(tmp_path: Path) -> None:
    """run.toml on a small text and with a small model: the held-out loss falls."""
    run = tomllib.loads((FOLDER / "run.toml").read_text())
    run["simulation"]["task_options"] = {"data_root": write_play(tmp_path)}
    run["task"]["options"]["width"], run["evaluation"]["every"], run["stop"]["rounds"] = 16, 1, 4
    reports: list[Report] = []
    simulate(Job(parse_simulation(run), 0, None), reports.append)
    result = reports[-1]
    assert isinstance(result, SeedResult), result
    assert result.rounds[-1].metrics["loss"] < result.rounds[0].metrics["loss"] - 0.1


def test_the_settings_of_the_readme_are_read() -> None:
    """They are parts of a coordinator's and of a daemon's settings, with the run's text and model."""
    server, device = blocks(FOLDER / "README.md")
    assert set(server) <= set(ServerConfig.model_fields)
    assert set(device) <= set(ClientConfig.model_fields)
    run = tomllib.loads((FOLDER / "run.toml").read_text())
    assert device["task"]["options"] == {**run["task"]["options"], "data_root": "data"}


def test_the_preset_is_that_of_the_page() -> None:
    """The page's table has the defaults, and a run may change each of them."""
    (sections,) = blocks(ROOT / "docs/training/pretraining.md")
    config = RunConfig.model_validate({"task": {"name": "digits"}, **sections})
    assert config.local.optimizer is not None
    assert (config.local.optimizer.name, config.local.optimizer.state, config.local.continue_data) == (
        "adamw", "device", True,
    )  # fmt: skip
    own = {"optimizer": {"name": "sgd"}, "continue_data": False}
    changed = RunConfig.model_validate({"task": {"name": "digits"}, **sections, "local": {**sections["local"], **own}})
    assert changed.local.optimizer is not None
    assert (changed.local.optimizer.name, changed.local.continue_data) == ("sgd", False)
