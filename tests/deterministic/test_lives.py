"""Lives of the whole system, each by its seed, in a process whose clocks are virtual."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def simulated(*arguments: str) -> Any:
    """The summary of a simulation. Fails with its output if a life fails."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.deterministic", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def test_lives_of_the_whole_system_keep_every_promise() -> None:
    """Each run is completed among kills, cuts, full disks, lies and operators, with the bits of its replay."""
    summary = simulated("--depth", "2", "--seeds", "13:63")
    assert summary["lives"] == 50
    assert {"kill", "term", "block", "call", "full", "lie", "operator"} <= summary["faults"].keys()


@pytest.mark.slow
def test_faults_planted_into_the_whole_system_are_found() -> None:
    """Each of them violates an invariant within a hundred lives of depth 2. The known seed is tried first."""
    assert None not in simulated("--planted", "--seeds", "0:100").values()


def test_a_life_is_the_same_each_time(tmp_path: Path) -> None:
    """In another process and after other lives, a seed's life has the same events, texts and virtual times."""
    results = tmp_path / "lives.jsonl"
    apart = simulated("--depth", "2", "--seeds", "13:21", "--processes", "2", "--batch", "1", "--results", str(results))
    assert apart["digest"] == simulated("--depth", "2", "--seeds", "13:21")["digest"]
    seeds = {tuple(json.loads(line)["seeds"]) for line in results.read_text().splitlines()}
    assert seeds == {(seed, seed + 1) for seed in range(13, 21)}
