"""The real process: `python -m fl_client --config client.toml`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes.forks import Forked, Program
from tests.processes.process import TIMEOUT_S

ROOT = Path(__file__).parents[2]

TASK = """
import torch
from fl_tasks import Classifier, Examples

class Tiny(Classifier):
    def model(self):
        return torch.nn.Linear(1, 2)

    def train_data(self, shard):
        return shard.of(Examples(torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)))

    def eval_data(self, shard=None):
        return self.train_data(shard)[:0]
"""


@pytest.fixture
def free_port() -> int:
    """A closed port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def settings(tmp_path: Path, free_port: int) -> Path:
    """client.toml in a folder with a task."""
    (tmp_path / "tiny_task.py").write_text(TASK)
    file = tmp_path / "client.toml"
    file.write_text(
        f'client_id = "edge-1"\nserver = "127.0.0.1:{free_port}"\nstate_dir = "state"\ninsecure = true\n'
        '[task]\nname = "tiny_task:Tiny"\n'
    )
    return file


@pytest.fixture
def start(settings: Path) -> Any:
    """Starts daemons in that folder. Those that still run at the end are killed."""
    started = []

    def start(*arguments: str) -> Any:
        process = subprocess.Popen(
            [sys.executable, "-m", "fl_client", *(arguments or ("--config", "client.toml"))],
            cwd=settings.parent,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lines_until(process: subprocess.Popen[str], event: str) -> list[dict[str, Any]]:
    """The log lines of a process up to an event."""
    assert process.stdout is not None
    assert process.stderr is not None
    lines = []
    for line in process.stdout:
        lines.append(json.loads(line))
        if lines[-1]["event"] == event:
            return lines
    raise AssertionError(f"ended without {event}: {lines}, {process.stderr.read()}")


@pytest.mark.slow
def test_a_daemon_without_a_server_retries_until_a_signal(
    start: Callable[..., subprocess.Popen[str]], free_port: int
) -> None:
    """It logs the address, the error and the next try. SIGTERM ends it with exit code 0."""
    process = start()
    line = lines_until(process, "disconnected")[-1]
    process.send_signal(signal.SIGTERM)
    rest, errors = process.communicate(timeout=TIMEOUT_S)
    assert line["server"] == f"127.0.0.1:{free_port}"
    assert "the port is closed" in line["reason"]
    assert line["next_try_seconds"] >= 0
    assert json.loads(rest.splitlines()[-1])["event"] == "stopped"
    assert (process.returncode, errors) == (0, "")


@pytest.mark.slow
def test_a_second_daemon_on_the_state_directory_is_refused(start: Callable[..., subprocess.Popen[str]]) -> None:
    """Exit code 2, and the message names the first daemon's process, which SIGINT ends with exit code 0."""
    first = start()
    lines_until(first, "disconnected")
    second = start()
    _, errors = second.communicate(timeout=TIMEOUT_S)
    assert second.returncode == 2
    assert f"held by another daemon, process {first.pid}" in errors
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 0


def test_a_wrong_configuration_is_one_line(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """Exit code 2, one line that names the mistake, no traceback."""
    (tmp_path / "client.toml").write_text('clientid = "x"')
    process = start()
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert errors.startswith("fl-client: client.toml: ")
    assert "clientid: unknown key, did you mean client_id?" in errors
    assert errors.count("\n") == 1


WRONG = """
import sys
from tiny_task import Tiny

if {at_import}:
    sys.exit(0)

class Wrong(Tiny):
    def train_data(self, shard):
        return open("absent.csv").read()
"""


@pytest.mark.parametrize(
    ("at_import", "text"),
    [
        pytest.param(
            True,
            "importing wrong_task for task wrong_task:Wrong raised SystemExit: 0 (wrong_task.py, line 6)",
            id="ends-the-process",
        ),
        pytest.param(
            False,
            "the task's train_data() raised FileNotFoundError: [Errno 2] No such file or directory: 'absent.csv'",
            id="no-data-file",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_fault_of_the_task_is_one_line(settings: Path, at_import: bool, text: str) -> None:
    """A task that ends the process, or whose data cannot be read: exit code 2 as for settings, and no traceback."""
    folder = settings.parent
    (folder / "wrong_task.py").write_text(WRONG.format(at_import=at_import))
    settings.write_text(settings.read_text().replace("tiny_task:Tiny", "wrong_task:Wrong"))
    out, err = folder / "out", folder / "err"
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    daemon = Forked(Program("fl_client", ["--config", "client.toml"], environment, folder, out, err))
    assert daemon.wait(TIMEOUT_S) == 2
    errors = err.read_text()
    assert errors.startswith(f"fl-client: task wrong_task:Wrong: {text}")
    assert errors.count("\n") == 1


@pytest.mark.slow
def test_a_crash_of_a_library_names_the_line(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """The process ends by a signal, its last log line names the task, and stderr the line of the task's code."""
    task = TASK + "\nimport ctypes\n\nctypes.string_at(0)\n"
    (tmp_path / "tiny_task.py").write_text(task)
    process = start()
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -signal.SIGSEGV
    line = json.loads(output.splitlines()[-1])
    assert (line["event"], line["task"]) == ("loading_task", "tiny_task:Tiny")
    assert f'tiny_task.py", line {task.count(chr(10))} in <module>' in errors
