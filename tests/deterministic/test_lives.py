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


Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Lines]:
    """The summary of fifty lives in one process, and the line of each batch of four."""
    results = tmp_path_factory.mktemp("lives") / "lives.jsonl"
    summary = simulated("--depth", "2", "--seeds", "13:63", "--batch", "4", "--results", str(results))
    return summary, lines_of(results)


def lines_of(results: Path) -> Lines:
    """The lines of a file of results."""
    return [json.loads(line) for line in results.read_text().splitlines()]


def test_lives_of_the_whole_system_keep_every_promise(lives: tuple[Any, Lines]) -> None:
    """Each run is completed among kills, cuts, full disks, lies and operators, with the bits of its replay."""
    summary, _ = lives
    assert summary["lives"] == 50
    assert {"kill", "term", "block", "call", "full", "lie", "operator"} <= summary["faults"].keys()


def test_a_life_is_the_same_each_time(lives: tuple[Any, Lines], tmp_path: Path) -> None:
    """In another process and without the lives before it, a life has the same events, texts and virtual times."""
    results, seeds = tmp_path / "lives.jsonl", range(53, 57)
    apart = simulated("--depth", "2", "--seeds", "53:57", "--processes", "2", "--batch", "1", "--results", str(results))
    (among,) = [line for line in lives[1] if line["seeds"] == [53, 57]]
    assert apart["digest"] == among["digest"]
    assert sorted(line["seeds"] for line in lines_of(results)) == [[seed, seed + 1] for seed in seeds]


@pytest.mark.slow
def test_faults_planted_into_the_whole_system_are_found() -> None:
    """Each of them violates an invariant within a hundred lives of depth 2. The known seed is tried first."""
    assert None not in simulated("--planted", "--seeds", "0:100").values()
