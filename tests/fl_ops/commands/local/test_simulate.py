"""`fl simulate`: its files, its messages, and its interruption."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from fl_ops.commands.cli import app
from fl_ops.simulate.output import console
from fl_ops.simulate.reports import Step
from fl_ops.simulate.seeds import Job, Report, simulate
from fl_ops.simulate.settings import read_simulation
from fl_tasks import load_task
from tests.marks import slow_except
from tests.processes.process import eventually

ROOT = Path(__file__).parents[4]
TASK_FOLDER = Path(__file__).parents[2]
WriteConfig = Callable[..., str]

pytestmark = pytest.mark.usefixtures("points_task")
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
def config(tmp_path: Path) -> WriteConfig:
    """Writes the run's file."""

    def write(algorithm: str = "fedcm", rate: float = 0.2, rounds: int = 2) -> str:
        path = tmp_path / "run.toml"
        path.write_text(FILE.format(algorithm=algorithm, rate=rate, rounds=rounds))
        return str(path)

    return write


def fl(*arguments: object) -> Result:
    """The command in this process."""
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_files_of_each_seed(config: WriteConfig, tmp_path: Path) -> None:
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


def test_results_name_an_engine_with_other_bits(config: WriteConfig, tmp_path: Path) -> None:
    """Lockstep, its device and its precision are among the settings. Other engines have the same bits."""
    lockstep = ("--engine", "batched", "--strategy", "one_by_one", "--group", "2", "--precision", "bfloat16")
    found = []
    for name, options in {"a": lockstep, "b": ("--engine", "sequential")}.items():
        result = fl(config(), *options, "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
        facts = json.loads((tmp_path / name / "seed-4" / "result.json").read_text())
        found.append(facts["settings"].get("engine"))
    clients = {"clients": "in lockstep", "device": "cpu", "strategy": "one_by_one", "group": 2}
    assert found == [{**clients, "precision": "bfloat16"}, None]


def test_a_model_with_tied_weights(config: WriteConfig, tmp_path: Path) -> None:
    """Its file loads strictly into the task's model."""
    path = Path(config())
    path.write_text(
        path.read_text().replace('name = "points:Points"', 'name = "points:Points"\noptions = {tied = true}')
    )
    result = fl(path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    model = load_task("points:Points", {"tied": True}).model()
    model.load_state_dict(load_file(tmp_path / "out" / "seed-4" / "model.safetensors"), strict=True)


@pytest.mark.slow
def test_processes_change_nothing(config: WriteConfig) -> None:
    """Two seeds in two processes have the same models as one after the other in this process."""
    digests = []
    for processes in ("1", "2"):
        result = fl(config(), "--seeds", "0,1", "--json", "--processes", processes)
        assert result.exit_code == 0, result.stderr
        digests.append([[done["digest"] for done in seed["rounds"]] for seed in json.loads(result.stdout)["seeds"]])
    assert digests[0] == digests[1]


def started(config: str, *arguments: str, folder: Path) -> subprocess.Popen[str]:
    """`fl simulate` as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{TASK_FOLDER}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "fl_ops", "simulate", config, *arguments], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def children_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that a process has started."""
    return [int(one) for one in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_run(config: WriteConfig, tmp_path: Path, number: signal.Signals) -> None:
    """Two workers of a run that is ended in the middle, also by a signal that it cannot handle."""
    process = started(config(rounds=100_000), "--workers", "2", folder=tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("seed ")
    workers = children_of(process)
    assert len(workers) == 2
    process.send_signal(number)
    process.communicate(timeout=120)
    eventually(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers) or None, "the workers end")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_an_interrupt_leaves_what_is_done(config: WriteConfig, tmp_path: Path, processes: str) -> None:
    """Ctrl-C ends it with 130, and every seed that was under way has its rounds and its model on disk."""
    arguments = ["--seeds", "0,1", "--processes", processes, "--out", "out"]
    process = started(config(rounds=100_000), *arguments, folder=tmp_path)
    seen = set()
    assert process.stdout is not None
    for line in process.stdout:
        seen.add(line[:6])
        if len(seen) == int(processes):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "")
    for seed in range(int(processes)):
        folder = tmp_path / "out" / f"seed-{seed}"
        facts = json.loads((folder / "result.json").read_text())
        rows = list(csv.DictReader((folder / "rounds.csv").read_text().splitlines()))
        assert facts["status"] == "interrupted"
        assert [row["model"] for row in rows] == [done["digest"] for done in facts["rounds"]] != []
        assert (folder / "model.safetensors").exists()


def test_a_failed_run_has_exit_code_7(config: WriteConfig, tmp_path: Path) -> None:
    """No update is admitted, and the last good model is kept."""
    result = fl(config("fedavg", rate=1e38), "--out", tmp_path)
    assert result.exit_code == 7
    assert "seed 4  failed: all updates of round 0, from 3 clients, had larger norms" in result.output
    assert load_file(tmp_path / "seed-4" / "model.safetensors")["weight"].isfinite().all()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(["--seeds", "0,x"], "--seeds: expected whole numbers such as 0,1,2", id="no-number"),
        pytest.param(["--seeds", "1,1"], "--seeds: expected each seed once", id="twice"),
        pytest.param(
            ["--state-dir", "s"], "--state-dir, --ledger and --client-configs require --replay", id="no-replay"
        ),
        pytest.param(["--replay", "run"], "--replay RUN requires --state-dir DIR", id="no-state"),
        pytest.param(["--replay", "run", "--state-dir", "s", "--ledger", "u"], "--state-dir DIR or --ledger", id="two"),
        pytest.param(["--replay", "run", "--state-dir", "nowhere"], "there is no ledger nowhere", id="no-ledger"),
        pytest.param(
            ["--replay", "run", "--ledger", "mysql://eve:secret@h/d"],
            "--ledger: expected the URL of a ledger",
            id="other-database",
        ),
        pytest.param(["--out", "run.toml"], "--out: run.toml/seed-4 cannot be written", id="out-is-a-file"),
    ],
)
def test_wrong_options(
    config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], expected: str
) -> None:
    """Exit code 2 with what was expected."""
    monkeypatch.chdir(tmp_path)
    result = fl(config(), *options)
    assert (result.exit_code, expected in result.output) == (2, True), result.output


def test_wrong_algorithm(config: WriteConfig) -> None:
    """The error is the coordinator's."""
    result = fl(config("fedcmx"))
    assert result.exit_code == 2
    assert "fedcmx" in result.output


@pytest.mark.parametrize("command", [["simulate"], ["run", "create"]])
def test_the_help_names_the_table(command: list[str]) -> None:
    """Square brackets are markup to what draws the help."""
    assert "[simulation]" in CliRunner().invoke(app, [*command, "--help"]).output


def faulty(config: WriteConfig, where: str) -> Path:
    """The run's file with a task of whose functions one raises."""
    path = Path(config())
    content = path.read_text().replace("points:Points", "faulty:Faulty")
    path.write_text(content.replace("[algorithm]", f'options = {{where = "{where}"}}\n[algorithm]'))
    return path


@pytest.mark.parametrize(
    ("where", "code", "seeds"),
    [
        ("init", 2, "0"), ("model", 2, "0"), ("eval_data", 2, "0"), ("loss", 7, "0"), ("metrics", 1, "0"),
        pytest.param("loss", 7, "0,1", marks=pytest.mark.slow),
        pytest.param("metrics", 1, "0,1", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_an_error_of_the_tasks_own_code(config: WriteConfig, where: str, code: int, seeds: str) -> None:
    """Its traceback begins in the task's module, appears once, and a line gives the reason; also from a process."""
    result = fl(faulty(config, where), "--seeds", seeds, "--processes", 2)
    assert result.exit_code == code, result.output
    assert result.output.count("Traceback (most recent call last):") == 1
    trace = result.output[result.output.index("Traceback") :].splitlines()
    assert trace[1].startswith(f'  File "{TASK_FOLDER / "faulty.py"}", line ')
    assert any(line.startswith(f'  File "{TASK_FOLDER / "faulty.py"}"') and "_measure" in line for line in trace)
    assert "RuntimeError: the sensor is unplugged" in trace
    assert any(line.endswith("RuntimeError: the sensor is unplugged") and "Error: " not in line[:8] for line in trace)


def test_a_wrong_option_has_no_traceback(config: WriteConfig) -> None:
    """The author's code took no part: the line states everything."""
    path = Path(config())
    path.write_text(path.read_text().replace("[algorithm]", "options = {nonsense = 1}\n[algorithm]"))
    result = fl(path)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)


@pytest.mark.parametrize("seeds", slow_except(["0", "0,1"], "0"))
def test_folders_for_a_task_with_data_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: str) -> None:
    """One line says what to do, also from a process of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("client-000", "client-001"):
        Path("data", name).mkdir(parents=True)
    Path("run.toml").write_text('task = {name = "digits"}\n[simulation]\nclients = 2\nfolders = "data/{name}"\n')
    result = fl("run.toml", "--seeds", seeds, "--processes", 2)
    assert result.exit_code == 2, result.output
    assert result.output.count("Traceback") == 0
    assert "got the folder data/client-000: remove the folder" in result.output


def test_progress_within_a_round(config: WriteConfig) -> None:
    """On a terminal a line has the client that trains; nothing of it is in a log."""
    jobs = [Job(read_simulation(Path(config())), 4, None)]
    reports: list[Report] = []
    simulate(jobs[0], reports.append)
    steps = [report[1] for report in reports if isinstance(report, tuple) and isinstance(report[1], Step)]
    assert steps[:3] == [
        Step(0, "client", 1, 2), Step(0, "client", 2, 2), Step(0, "evaluation"),
    ]  # fmt: skip
    screen, log = io.StringIO(), io.StringIO()
    console.simulate(jobs, 1, Console(file=screen, force_terminal=True, width=80, legacy_windows=False))
    console.simulate(jobs, 1, Console(file=log, width=80))
    assert "seed 4  round 1 of 2: client 1 of 2" in screen.getvalue()
    assert ["round" in line for line in log.getvalue().splitlines()] == [True, True, True]
