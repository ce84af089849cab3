"""Lives of the whole system, each by its seed, in a process whose clocks are virtual."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deterministic.first_seeds import FOUND, PLANTED

ROOT = Path(__file__).parents[2]
ROW = range(31)


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
    """The summary of fifty lives in one process, and the line of each.

    They are a row, those that find planted faults, and those that have found another fault.
    """
    results = tmp_path_factory.mktemp("lives") / "lives.jsonl"
    options = ("--seeds", f"{ROW.start}:{ROW.stop}", "--known", "--batch", "1", "--results", str(results))
    return simulated("--depth", "2", *options), lines_of(results)


def lines_of(results: Path) -> Lines:
    """The lines of a file of results."""
    return [json.loads(line) for line in results.read_text().splitlines()]


def test_lives_of_the_whole_system_keep_every_promise(lives: tuple[Any, Lines]) -> None:
    """Each run is completed among kills, cuts, full disks, lies and operators, with the bits of its replay.

    Among them are the lives in which planted faults would be found, and in all of them every planted fault.
    """
    summary, lines = lives
    seeds = [line["seeds"][0] for line in lines]
    assert sorted(seeds) == sorted({*ROW, *FOUND, *(seed for _, seed in PLANTED[2].values())})
    assert (summary["lives"], summary["failed"]) == (len(seeds), {})
    assert {"kill", "term", "block", "call", "full", "lie", "operator"} <= summary["faults"].keys()


def test_a_life_is_the_same_each_time(lives: tuple[Any, Lines], tmp_path: Path) -> None:
    """In another process and without the lives before it, a life has the same events, texts and virtual times."""
    results = tmp_path / "lives.jsonl"
    simulated("--depth", "2", "--seeds", "14", "--results", str(results))
    among, apart = ({line["seeds"][0]: line["digest"] for line in lines} for lines in (lives[1], lines_of(results)))
    assert apart == {14: among[14]}


@pytest.mark.slow
def test_faults_planted_into_the_whole_system_are_found() -> None:
    """Each of them violates an invariant within a hundred lives of depth 2. The known seed is tried first."""
    assert None not in simulated("--planted", "--seeds", "0:100").values()
