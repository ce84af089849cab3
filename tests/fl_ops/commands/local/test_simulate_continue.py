"""`fl simulate --continue`: real processes that are interrupted or killed, and continued."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fl_ops.commands.cli import app

ROOT = Path(__file__).parents[4]
TASK_FOLDER = Path(__file__).parents[2]
ROUNDS = 40

pytestmark = pytest.mark.usefixtures("points_task")
FILE = """
seed = 4
[task]
name = "points:Points"
[algorithm]
name = "scaffold"
[local]
learning_rate = 0.05
epochs = 3
[stop]
rounds = {rounds}
[simulation]
clients = 7
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The run's file."""
    path = tmp_path / "run.toml"
    path.write_text(FILE.format(rounds=ROUNDS))
    return path


def fl(*arguments: object) -> Result:
    """The command in this process."""
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def stopped(config: Path, after: str, number: signal.Signals, *options: str) -> int:
    """Start the command as a process, and send it a signal when it has printed `after`. Returns its exit code."""
    environment = {**os.environ, "PYTHONPATH": f"{TASK_FOLDER}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-u", "-m", "fl_ops", "simulate", str(config), "--out", "out", *options]
    with subprocess.Popen(command, cwd=config.parent, env=environment, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if after in line:
                process.send_signal(number)
                break
        process.stdout.read()
        return process.wait(120)


def results(folder: Path) -> tuple[Any, list[dict[str, str]], bytes]:
    """The content of a run's files, without times."""
    facts = json.loads((folder / "result.json").read_text())
    rows = list(csv.DictReader((folder / "rounds.csv").read_text().splitlines()))
    for row in [*facts["rounds"], *rows]:
        del row["seconds"]
    del facts["profile"]
    return facts, rows, (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_that_was_killed_and_interrupted_ends_as_one_that_was_not(config: Path, tmp_path: Path) -> None:
    """SIGKILL in round 8, Ctrl-C in round 20, then to the end: all files are equal but for times."""
    assert stopped(config, "round 7:", signal.SIGKILL, "--save-every", "0", "--workers", "2") == -signal.SIGKILL
    assert stopped(config, "round 19:", signal.SIGINT, "--continue", "--workers", "1") == 130
    last = json.loads((tmp_path / "out" / "seed-4" / "result.json").read_text())
    assert (last["status"], len(last["rounds"]) >= 20) == ("interrupted", True)
    result = fl(config, "--out", tmp_path / "out", "--continue")
    assert result.exit_code == 0, result.output
    assert "seed 4  continues after" in result.output
    assert "round 19:" not in result.output
    whole = fl(config, "--out", tmp_path / "whole")
    assert whole.exit_code == 0, whole.output
    assert results(tmp_path / "out" / "seed-4") == results(tmp_path / "whole" / "seed-4")


@pytest.mark.slow
def test_seeds_continue_each_where_it_is(config: Path, tmp_path: Path) -> None:
    """Seed 0 has ended and is not simulated again, seed 1 was stopped, seed 2 has not begun."""
    short = Path(str(config).replace("run", "short"))
    short.write_text(FILE.format(rounds=3))
    assert fl(short, "--out", tmp_path / "out", "--seeds", "0").exit_code == 0
    assert stopped(short, "round 0:", signal.SIGINT, "--seeds", "1") == 130
    result = fl(short, "--out", tmp_path / "out", "--seeds", "0,1,2", "--continue")
    assert result.exit_code == 0, result.output
    assert "seed 0  continues after 3 rounds" in result.output
    assert "seed 0  round" not in result.output
    assert "seed 2  round 0:" in result.output
    assert fl(short, "--out", tmp_path / "whole", "--seeds", "0,1,2").exit_code == 0
    for seed in range(3):
        assert results(tmp_path / "out" / f"seed-{seed}") == results(tmp_path / "whole" / f"seed-{seed}")


@pytest.mark.slow
def test_a_stopped_run_is_not_overwritten(config: Path, tmp_path: Path) -> None:
    """Without --continue the command ends with 2 and leaves the files; with other settings it ends with 1."""
    assert stopped(config, "round 1:", signal.SIGINT) == 130
    before = results(tmp_path / "out" / "seed-4")
    result = fl(config, "--out", tmp_path / "out")
    assert (result.exit_code, "continue it with --continue" in result.output) == (2, True), result.output
    config.write_text(config.read_text().replace("0.05", "0.06"))
    result = fl(config, "--out", tmp_path / "out", "--continue")
    assert result.exit_code == 1
    assert "run.local.learning_rate was 0.05 and is 0.06" in result.output
    assert results(tmp_path / "out" / "seed-4") == before


@pytest.mark.parametrize("option", [["--continue"], ["--save-every", "5"]])
def test_the_options_need_a_folder(config: Path, option: list[str]) -> None:
    """Without --out there is nothing to continue, and no place for a save."""
    result = fl(config, *option)
    assert (result.exit_code, "require --out DIR" in result.output) == (2, True)
