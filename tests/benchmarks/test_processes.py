"""Processes of the benchmarks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes.process import TIMEOUT_S, eventually

ROOT = Path(__file__).parents[2]


def test_a_child_ends_when_its_stdin_is_closed(tmp_path: Path) -> None:
    """A closed stdin means that the parent has ended; the child ignores SIGTERM."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)"
    (tmp_path / "a_program.py").write_text(f"{deaf}\ntime.sleep(1000)")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, str(ROOT / "benchmarks" / "processes.py"), "a_program"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(TIMEOUT_S) == 1


POOL = """
with worker_pool(1) as pool:
    pool.submit(time.sleep, 1000)
    report()
"""
CROWD = """
with running(time.sleep, [(1000,)] * 2):
    report()
"""
PROGRAM = """
with TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
    processes.run("child", ["sleep", "1000"])
    report()
"""
PREPARED = """
import tempfile
import time
from pathlib import Path
from tempfile import TemporaryDirectory
import psutil
from benchmarks.crowds.processes import running, worker_pool
from benchmarks.processes import Processes

def report():
    print(*(child.pid for child in psutil.Process().children()), flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("what", "number"),
    [
        pytest.param(POOL, signal.SIGTERM, id="pool-terminated"),
        pytest.param(POOL, signal.SIGKILL, id="pool-killed"),
        pytest.param(CROWD, signal.SIGTERM, id="crowd-terminated"),
        pytest.param(CROWD, signal.SIGKILL, id="crowd-killed"),
        pytest.param(PROGRAM, signal.SIGTERM, id="program-terminated"),
    ],
)
def test_a_benchmark_leaves_no_process(tmp_path: Path, what: str, number: signal.Signals) -> None:
    """`timeout` sends SIGTERM, which removes the folders too."""
    (tmp_path / "a_program.py").write_text(PREPARED + what)
    (folder := tmp_path / "temporary").mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "benchmarks.processes", "a_program"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as benchmark:
        assert benchmark.stdout is not None
        children = [psutil.Process(int(pid)) for pid in benchmark.stdout.readline().split()]
        assert children
        benchmark.send_signal(number)
        assert benchmark.wait(TIMEOUT_S) != 0
    eventually(lambda: not any(map(_runs, children)), "the children have ended")
    assert number is signal.SIGKILL or not list(folder.iterdir())


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
