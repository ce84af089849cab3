"""examples/shakespeare: central training by its script, then its run, on a small text."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fl_client.settings.config import ClientConfig
from fl_ops.simulate.output.results import SeedResult
from fl_ops.simulate.seeds import Job, Report, simulate
from fl_ops.simulate.settings import parse_simulation
from fl_server.settings.config import ServerConfig
from fl_tasks.built_in.shakespeare import Shakespeare
from fl_tasks.evaluation import evaluate
from tests.fl_tasks.built_in.plays import write_play

FOLDER = Path(__file__).parents[3] / "examples" / "shakespeare"


def small_run(root: str, base: Path) -> dict[str, Any]:
    """run.toml on the small text: three speakers, two of them in each of two rounds."""
    run = tomllib.loads((FOLDER / "run.toml").read_text())
    assert set(run["task"]["options"]) == {"lora"}
    assert set(run["simulation"]["task_options"]) == {"data_root", "base"}
    run["simulation"]["task_options"] = {"data_root": root, "base": str(base), "least_characters": 500}
    run["round"]["clients_per_round"], run["stop"]["rounds"] = 2, 2
    run["evaluation"]["every"], run["simulation"]["clients"] = 1, 3
    return run


@pytest.mark.slow
def test_the_example_trains_centrally_and_then_by_speaker(tmp_path: Path) -> None:
    """The script's weights are the run's base, and adapters of rank 8 on them lower the speakers' held-out loss."""
    root, base = write_play(tmp_path), tmp_path / "base.safetensors"
    script = [sys.executable, str(FOLDER / "pretrain.py"), "--data-root", root, "--out", str(base), "--epochs", "2"]
    # The text of the second and fourth speaker is public with this number.
    done = subprocess.run([*script, "--least-characters", "2600"], capture_output=True, text=True, check=True)
    assert re.search(r"loss [\d.]+, accuracy [\d.]+ on the clients' held-out text", done.stdout)
    reports: list[Report] = []
    simulate(Job(parse_simulation(small_run(root, base)), 0, None), reports.append)
    result = reports[-1]
    assert isinstance(result, SeedResult), result
    task = Shakespeare(root, base=str(base), least_characters=500)
    assert result.rounds[-1].metrics["loss"] < evaluate(task, task.model(), task.eval_data())["loss"]
    assert {row.bytes_up / len(row.accepted) for row in result.rounds} == {4 * 20_736}


def test_the_device_of_the_readme_has_one_speaker() -> None:
    """Its table is part of a daemon's settings, and the partition has a client for each speaker."""
    server, device = map(tomllib.loads, re.findall(r"```toml\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL))
    assert set(server) <= set(ServerConfig.model_fields)
    assert set(device) <= set(ClientConfig.model_fields)
    assert device["shard"]["partition"] == {"method": "natural", "clients": 99}
