"""The command for real: a coordinator and daemons in processes of their own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from fl_ops.demo.settings import DemoSettings, Method
from fl_ops.simulate.clients import deal
from fl_ops.simulate.settings import parse_plan
from fl_ops.simulate.simulation import Simulation

ROOT = Path(__file__).parents[3]
PATIENCE = 100


def children_in_mid_round(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The demo's processes, once it has trained a round and is in the next."""
    for line in process.stdout or ():
        if line.startswith("round 0 committed"):
            return psutil.Process(process.pid).children(recursive=True)
    raise AssertionError(process.stderr.read() if process.stderr else "no round was committed")


def test_it_trains_compares_and_leaves_page_picture_and_numbers(demo, tmp_path):
    """With --json stdout is the result alone; accuracies are those of the same run in one process, to the last bit."""
    process = demo("--clients", "2", "--rounds", "2", "--seed", "5", "--json")
    printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    facts = json.loads(printed)
    assert facts == json.loads((tmp_path / "demo-out" / "demo.json").read_text())
    assert (tmp_path / "demo-out" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert "](accuracy.png)" in (tmp_path / "demo-out" / "report.md").read_text()
    assert list(facts["algorithms"]) == ["fedcm", "fedavg"]
    assert [accuracies(facts, name) for name in ("fedcm", "fedavg")] == [
        in_process(name, facts["algorithms"][name]) for name in ("fedcm", "fedavg")
    ]
    assert not list((tmp_path / "temporary").iterdir())


def accuracies(facts, algorithm):
    """Of the rounds in the JSON."""
    return [one["accuracy"] for one in facts["algorithms"][algorithm]["rounds"]]


def in_process(name, facts):
    """Accuracies of the same run with no network."""
    settings = DemoSettings(clients=2, rounds=2, seed=5)
    run = settings.run(Method(name, facts["learning_rate"], facts["parameters"], ""))
    partition = {"method": "dirichlet", "alpha": 0.1}
    plan = parse_plan({**run, "simulation": {"clients": 2, "names": "client-{index}", "partition": partition}})
    dealt = deal(plan, 5)
    with Simulation(dealt.config, dealt.clients) as simulation:
        return [done.metrics["accuracy"] for done in simulation.rounds()]


@pytest.mark.slow
def test_ctrl_c_in_mid_round_leaves_no_process(demo, tmp_path):
    """Exit code 130, every child is gone when the demo is, and so is its temporary folder."""
    process = demo("--clients", "2", "--rounds", "10000")
    children = children_in_mid_round(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert len(children) == 3
    assert not [child for child in children if child.is_running()]
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.slow
def test_a_demo_that_is_killed_leaves_no_process(demo):
    """SIGKILL gives it no time to clean up; its children end by themselves."""
    process = demo("--clients", "2", "--rounds", "10000")
    children = children_in_mid_round(process)
    process.kill()
    gone, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert (len(gone), alive) == (3, [])


@pytest.mark.slow
def test_a_daemon_that_dies_ends_the_demo_in_words(demo, tmp_path):
    """Exit code 1; it says who ended and how, what that one said last, and where its log lies."""
    process = demo("--clients", "2", "--rounds", "10000")
    children = children_in_mid_round(process)
    next(child for child in children if "client-1.toml" in " ".join(child.cmdline())).kill()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "client-1 was killed by SIGKILL before the demo was done; its log is demo-out/logs/client-1.log" in errors
    assert '"event": "starting"' in errors
    assert not [child for child in children if child.is_running()]


@pytest.mark.slow
def test_a_task_of_ones_own_in_this_folder_is_trained(demo, tmp_path):
    """The documentation's example, as it stands there: at most 30 lines, and the page says what was not tuned."""
    page = (ROOT / "docs" / "bring-your-own-model.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    (tmp_path / "my_task.py").write_text(code)
    (tmp_path / "tasks.py").write_text("raise RuntimeError('not the package that was meant')")
    command = "--task my_task:Wine --clients 3 --rounds 2 --learning-rate 0.2 --out here"
    process = demo(*command.split())
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert len(code.splitlines()) <= 30
    report = (tmp_path / "here" / "report.md").read_text()
    assert "FedCM: rate 0.2 (--learning-rate), alpha 0.1" in report
    assert "not tuned for my_task:Wine" in report


def test_what_cannot_work_is_said_before_anything_is_trained(demo, tmp_path):
    """Exit code 2 for an unknown task, in the words of who knows tasks, and nothing is left running."""
    process = demo("--task", "digit")
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert 'Did you mean "digits"?' in errors
    assert not list((tmp_path / "temporary").iterdir())
    assert Path(tmp_path / "demo-out" / "logs").exists()


def test_an_out_that_cannot_be_written_is_told_first(demo, tmp_path):
    """Exit code 2, and nothing was started: a file is where the folder should be."""
    (tmp_path / "taken").write_text("")
    process = demo("--out", "taken")
    printed, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, printed) == (2, "")
    assert errors.startswith("error: --out: nothing can be written to taken: ")
