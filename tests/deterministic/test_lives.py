"""Lives of the whole system, each by its seed, in a process whose clocks are virtual."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def simulated(*arguments: str) -> str:
    """The output of a simulation. Fails with its output if a life fails."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.deterministic", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-3000:]}"
    return done.stdout


def test_lives_of_the_whole_system_keep_every_promise() -> None:
    """Each run is completed among kills, cuts, full disks, lies and operators, with the bits of its replay."""
    assert "20 lives of depth 2" in simulated("--depth", "2", "--seeds", "13:33")
