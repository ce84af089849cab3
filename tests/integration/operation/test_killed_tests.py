"""A program that forks programs of ours for a test or a soak, and is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.processes.process import ROOT, TIMEOUT_S, eventually

STARTS = """
import os, sys, time
from pathlib import Path
from tests.processes import forks

forks.start()
folder = Path(sys.argv[1])
files = folder, folder / "out", folder / "err"
program = forks.Forked(forks.Program("a_program", [], {"PYTHONPATH": str(folder)}, *files))
print(program.pid, flush=True)
time.sleep(1000)
"""


def test_a_forked_program_ends_with_who_started_it(tmp_path: Path) -> None:
    """Also one that ignores SIGTERM, after SIGKILL: nothing of a soak, of chaos or of a test goes on without them."""
    (tmp_path / "a_program.py").write_text(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
    )
    command = [sys.executable, "-c", STARTS, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ}, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        forked = psutil.Process(int(starter.stdout.readline()))
        assert forked.is_running()
        starter.kill()
        starter.wait(TIMEOUT_S)
    eventually(lambda: not forked.is_running() or forked.status() == psutil.STATUS_ZOMBIE, "it has ended")
