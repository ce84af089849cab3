"""The command for real: a coordinator and daemons in processes of their own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from fl_ops.demo.settings import DemoSettings, Method
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.settings import parse_simulation
from fl_ops.simulate.simulation import Simulation
from tests.fl_ops.conftest import Fl
from tests.fl_ops.demo.conftest import TEMPORARY, StartDemo

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 100
FAMILY = 5
"""Processes of a demo with two daemons: these, their coordinator, and two of multiprocessing."""


def children_in_mid_round(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The demo's processes, once it has trained a round and is in the next."""
    for line in process.stdout or ():
        if line.startswith("round 0 committed"):
            return psutil.Process(process.pid).children(recursive=True)
    raise AssertionError(process.stderr.read() if process.stderr else "no round was committed")


@pytest.mark.slow
def test_it_trains_compares_and_writes_page_plot_and_numbers(demo: StartDemo, tmp_path: Path) -> None:
    """With --json stdout has the result only; both models' accuracies equal a simulated run's, to the last bit."""
    process = demo("--clients", "2", "--rounds", "3", "--seed", "5", "--json")
    printed, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    facts = json.loads(printed)
    assert facts == json.loads((tmp_path / "demo-out" / "demo.json").read_text())
    assert (tmp_path / "demo-out" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert "](accuracy.png)" in (tmp_path / "demo-out" / "report.md").read_text()
    assert list(facts["algorithms"]) == ["fedcm", "fedavg"]
    assert [accuracies(facts, name) for name in ("fedcm", "fedavg")] == [
        in_process(name, facts["algorithms"][name]) for name in ("fedcm", "fedavg")
    ]
    assert facts["recovery"]["equal_models"] == [True, True, True]
    refused, failed = facts["faults"]
    assert refused.startswith("exaggerating was refused 2 of 2 times (norm)")
    assert "the camera of this device does not answer" in failed
    assert "the models of all 3 rounds have the bits of the undisturbed run" in " ".join(errors.split())
    assert not list((tmp_path / TEMPORARY).iterdir())


def accuracies(facts: dict[str, Any], algorithm: str) -> list[dict[str, float]]:
    """Accuracies of each round in the JSON, by model."""
    return [one["accuracy"] for one in facts["algorithms"][algorithm]["rounds"]]


def in_process(name: str, facts: dict[str, Any]) -> list[dict[str, float]]:
    """Accuracies of the same run, simulated."""
    settings = DemoSettings(clients=2, rounds=3, seed=5)
    run = settings.run(Method(name, facts["learning_rate"], facts["parameters"], facts["max_gradient_norm"]))
    partition = {"method": "dirichlet", "alpha": 0.1}
    config = parse_simulation({**run, "simulation": {"clients": 2, "names": "client-{index}", "partition": partition}})
    prepared = prepare(config, 5)
    with Simulation(prepared.config, prepared.clients) as simulation:
        return [
            {"averaged": done.metrics["averaged_accuracy"], "latest": done.metrics["accuracy"]}
            for done in simulation.rounds()
        ]


@pytest.mark.slow
def test_ctrl_c_in_mid_round_leaves_no_process(demo: StartDemo, tmp_path: Path) -> None:
    """Exit code 130; every child ends, and the temporary folder is gone when the demo is."""
    process = demo("--clients", "2", "--rounds", "10000")
    children = children_in_mid_round(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert len(children) == FAMILY
    assert not psutil.wait_procs(children, timeout=TIMEOUT_S)[1]
    assert not list((tmp_path / TEMPORARY).iterdir())


@pytest.mark.slow
def test_a_demo_that_is_killed_leaves_no_process(demo: StartDemo) -> None:
    """SIGKILL gives it no time to clean up; its children end by themselves."""
    process = demo("--clients", "2", "--rounds", "10000")
    children = children_in_mid_round(process)
    process.kill()
    gone, alive = psutil.wait_procs(children, timeout=TIMEOUT_S)
    assert (len(gone), alive) == (FAMILY, [])


@pytest.mark.slow
def test_a_daemon_that_dies_ends_the_demo_with_an_error(demo: StartDemo, tmp_path: Path) -> None:
    """Exit code 1; the error has the daemon, its end, its log file and the last lines of the log."""
    process = demo("--clients", "2", "--rounds", "10000")
    children = children_in_mid_round(process)
    writes = [one for one in children if any(file.path.endswith("client-1/lock") for file in one.open_files())]
    writes[0].kill()
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "client-1 was killed by SIGKILL before the demo was done; its log is demo-out/logs/client-1.log" in errors
    assert '"event": "starting"' in errors
    assert not psutil.wait_procs(children, timeout=TIMEOUT_S)[1]


@pytest.mark.slow
def test_a_task_in_the_current_folder_is_trained(demo: StartDemo, tmp_path: Path) -> None:
    """The example of the documentation, at most 30 lines, is trained unchanged. The page states "not tuned"."""
    page = (ROOT / "docs/start/bring-your-own-model.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    (tmp_path / "my_task.py").write_text(code)
    (tmp_path / "protos.py").write_text("raise RuntimeError('not the package that was meant')")
    command = "--task my_task:Wine --clients 3 --rounds 2 --learning-rate 0.2 --out here"
    process = demo(*command.split())
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    assert len(code.splitlines()) <= 30
    report = (tmp_path / "here" / "report.md").read_text()
    assert "FedCM: rate 0.2 (--learning-rate), alpha 0.1" in report
    assert "not tuned for my_task:Wine" in report


def test_an_unknown_task_ends_the_demo_before_any_training(
    fl: Fl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 with the known tasks, and no process or temporary folder is left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = psutil.Process().children()
    result = fl("demo", "--task", "digit")
    assert (result.exit_code, 'Did you mean "digits"?' in result.stderr) == (2, True)
    assert [child.cmdline() for child in psutil.Process().children() if child not in before] == []
    assert [path.name for path in tmp_path.iterdir()] == ["demo-out"]
    assert (tmp_path / "demo-out" / "logs").exists()


def test_a_folder_that_cannot_be_written_is_reported_first(fl: Fl, tmp_path: Path) -> None:
    """Exit code 2, and nothing was started: a file is where the folder should be."""
    (tmp_path / "taken").write_text("")
    result = fl("demo", "--out", "taken")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --out: taken cannot be written: ")
