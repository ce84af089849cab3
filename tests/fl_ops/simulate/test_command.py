"""`fl simulate` as a command: its files, its words, and how it is interrupted."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from fl_ops.cli import app

ROOT = Path(__file__).parents[3]
FILE = """
seed = 4
[task]
name = "points:Points"
[algorithm]
name = "{algorithm}"
[local]
learning_rate = {rate}
[stop]
rounds = {rounds}
[simulation]
clients = 3
"""


@pytest.fixture
def config(tmp_path):
    """Writes the run's file."""

    def write(algorithm="fedcm", rate=0.2, rounds=2):
        path = tmp_path / "run.toml"
        path.write_text(FILE.format(algorithm=algorithm, rate=rate, rounds=rounds))
        return str(path)

    return write


def fl(*arguments):
    """The command in this process."""
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_files_of_each_seed(config, tmp_path):
    """A folder a seed: rounds as CSV, the model, and the result with every setting's value, defaults too."""
    result = fl(config(), "--seeds", "0,1", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "seed 1  completed: 2 rounds are done" in result.output
    folder = tmp_path / "out" / "seed-1"
    facts = json.loads((folder / "result.json").read_text())
    settings = facts["settings"]
    assert settings["run"]["algorithm"]["parameters"]["order"] == "paper"
    assert settings["run"]["local"]["max_gradient_norm"] == 0.0
    assert settings["simulation"]["partition"]["seed"] == settings["run"]["seed"] == 1
    assert settings["task"]["evaluated_on"] == "thirty more points"
    rows = list(csv.DictReader((folder / "rounds.csv").read_text().splitlines()))
    assert [row["model"] for row in rows] == [done["digest"] for done in facts["rounds"]]
    assert {name: tuple(it.shape) for name, it in load_file(folder / "model.safetensors").items()} == {
        "weight": (3, 4),
        "bias": (3,),
    }


def test_processes_change_nothing(config, tmp_path):
    """Two seeds side by side come to the models of one after the other."""
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fl_ops", "simulate", config(), "--seeds", "0,1", "--json"]
    facts = []
    for processes in ("1", "2"):
        done = subprocess.run(
            [*command, "--processes", processes],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        facts.append([[each["digest"] for each in seed["rounds"]] for seed in json.loads(done.stdout)["seeds"]])
    assert facts[0] == facts[1]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_an_interrupt_leaves_what_is_done(config, tmp_path, processes):
    """Ctrl-C ends it with 130, and every seed that was under way has its rounds and its model on disk."""
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-u", "-m", "fl_ops", "simulate", config(rounds=100_000), "--seeds", "0,1"]
    process = subprocess.Popen(
        [*command, "--processes", processes, "--out", "out"], cwd=tmp_path, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    seen = set()
    for line in process.stdout:
        seen.add(line[:6])
        if len(seen) == int(processes):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
    for seed in range(int(processes)):
        folder = tmp_path / "out" / f"seed-{seed}"
        facts = json.loads((folder / "result.json").read_text())
        rows = list(csv.DictReader((folder / "rounds.csv").read_text().splitlines()))
        assert facts["status"] == "interrupted"
        assert [row["model"] for row in rows] == [done["digest"] for done in facts["rounds"]] != []
        assert (folder / "model.safetensors").exists()


def test_a_failed_run_has_exit_code_7(config, tmp_path):
    """Divergence is told in words, and the last good model is kept."""
    result = fl(config("fedavg", rate=1e38), "--out", tmp_path)
    assert result.exit_code == 7
    assert "seed 4  failed: the model of round 0 is not finite" in result.output
    assert load_file(tmp_path / "seed-4" / "model.safetensors")["weight"].isfinite().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(["--seeds", "0,x"], "--seeds: expected whole numbers such as 0,1,2", id="no-number"),
        pytest.param(["--seeds", "1,1"], "--seeds: expected each seed once", id="twice"),
        pytest.param(["--state-dir", "s"], "--state-dir, --ledger and --client-configs belong to", id="no-replay"),
        pytest.param(["--replay", "run"], "--replay RUN goes with --state-dir DIR", id="no-state"),
        pytest.param(["--replay", "run", "--state-dir", "s", "--ledger", "u"], "--state-dir DIR or --ledger", id="two"),
        pytest.param(["--replay", "run", "--state-dir", "nowhere"], "there is no ledger nowhere", id="no-ledger"),
        pytest.param(
            ["--replay", "run", "--ledger", "mysql://eve:secret@h/d"],
            "--ledger: expected the URL of a ledger",
            id="other-database",
        ),
        pytest.param(["--out", "run.toml"], "--out: nothing can be written to run.toml/seed-4", id="out-is-a-file"),
    ],
)
def test_wrong_options(config, tmp_path, monkeypatch, options, words):
    """Exit code 2 with what was expected."""
    monkeypatch.chdir(tmp_path)
    result = fl(config(), *options)
    assert (result.exit_code, words in result.output) == (2, True), result.output


def test_wrong_algorithm(config):
    """What the coordinator would refuse is refused here, in its words."""
    result = fl(config("fedcmx"))
    assert result.exit_code == 2
    assert "fedcmx" in result.output


@pytest.mark.parametrize("command", [["simulate"], ["run", "create"]])
def test_the_help_names_the_table(command):
    """Square brackets are markup to what draws the help."""
    assert "[simulation]" in CliRunner().invoke(app, [*command, "--help"]).output
