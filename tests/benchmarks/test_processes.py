"""Processes of the benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.processes.process import TIMEOUT_S

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
