"""`fl new`: each template is made, passes its own tests and `fl task check`, and trains two rounds with two daemons."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fl_ops import new_package
from fl_ops.errors import OpsError
from fl_ops.new_package import TEMPLATES
from tests.fl_ops.conftest import Fl
from tests.processes.scripts import Scripts

ROOT = Path(__file__).parents[2]
HEAVY = {"lora", "transformers", "image", "text"}


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.timeout(1200)] if name in HEAVY else [])
        for name in TEMPLATES
    ],
)
def test_a_new_package_works_at_once(template: str, fl: Fl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task has under 40 lines, its tests and the check pass, and two daemons train two rounds.

    The output of the command has the commands for the new folder.
    """
    monkeypatch.chdir(tmp_path)
    made = fl("new", "my_task", "--template", template)
    assert made.exit_code == 0, made.output
    assert "fl task check my_task.task:MyTask --folder data/site-0" in made.stdout
    folder = tmp_path / "my_task"
    assert len((folder / "my_task/task.py").read_text().splitlines()) < 40
    run = folder / "run.toml"
    run.write_text(run.read_text().replace("rounds = 10", "rounds = 2"))
    sites = ("--folder", "data/site-0", "--folder", "data/site-1")
    with Scripts(tmp_path / "bin") as scripts:
        path = (scripts.folder, Path(sys.executable).parent)
        checked = json.loads(ran(folder, path, "fl", "task", "check", "my_task.task:MyTask", *sites, "--json"))
        shown = ran(folder, path, "sh", "two-daemons.sh")
    assert {finding["result"] for finding in checked["findings"]} == {"ok"}, checked
    assert "completed: 2 rounds are done" in shown
    assert (folder / "model.safetensors").stat().st_size > 1000
    ran(folder, path, sys.executable, "-m", "unittest")


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name not in {"lora", "transformers"}])
def test_a_new_package_passes_our_own_checks_of_style(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ruff's usual rules have nothing to say about it, in the line length of this project."""
    monkeypatch.setattr(new_package, "_generate", lambda folder, name: None)  # data, which ruff does not read
    folder = new_package.make("my_task", template, tmp_path)
    ruff = [str(Path(sys.executable).parent / "ruff"), "check", "--isolated", "--line-length", "120"]
    assert subprocess.run([*ruff, "--select", "E,F,I,B,UP,C4", "."], cwd=folder, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [("My-Task", "lower-case letters"), ("json", "is a module here"), ("class", "lower-case"), ("there", "exists")],
)
def test_a_name_that_does_not_fit_changes_nothing(name: str, expected: str, tmp_path: Path) -> None:
    """The message has the reason, and no folder is made."""
    (tmp_path / "there").mkdir()
    with pytest.raises(OpsError, match=expected):
        new_package.make(name, "tabular", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.slow  # a name that does not fit leaves no folder either
def test_data_that_cannot_be_generated_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator's error is shown, and the name is free again."""
    monkeypatch.setattr(new_package, "_write", lambda made, *_: made.mkdir())
    with pytest.raises(OpsError, match=r"could not be generated: .*my_task"):
        new_package.make("my_task", "tabular", tmp_path)
    assert list(tmp_path.iterdir()) == []


def ran(folder: Path, path: Sequence[Path], *command: str) -> str:
    """The output of a command in the new folder, with the programs of these folders and free ports."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment |= {
        "PATH": os.pathsep.join([*map(str, path), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "COORDINATOR": f"127.0.0.1:{free_port()}",
        "ADMIN": f"127.0.0.1:{free_port()}",
    }
    if not shutil.which(command[0], path=environment["PATH"]):
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    logs = "".join(log.read_text() for log in folder.glob("work/*.log")) if done.returncode else ""
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert command[0] != "fl" or done.stderr == ""  # no library's lines beside ours
    return done.stdout


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
