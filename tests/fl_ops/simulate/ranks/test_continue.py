"""`fl simulate --continue` with other ranks, workers or engines than before: the same bits, or a refusal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fl_ops.simulate.ranks.launch import PYTHON, SIMULATE, Launches, children_of, standalone

RUN = """
[task]
name = "points:Points"
[algorithm]
name = "scaffold"
[local]
learning_rate = 0.05
epochs = 2
[round]
clients_per_round = 4
[stop]
rounds = ROUNDS
[simulation]
clients = 7
"""
DISTRIBUTED = ("--distributed", "--workers", "1")
LOCKSTEP = ("--engine", "batched", "--strategy", "one_by_one", "--group", "2")
SAVED = ("--out", "out", "--save-every", "0")


def started(launches: Launches, folder: Path, *arguments: str, ranks: int, until: str) -> subprocess.Popen[str]:
    """The command with a save after each round, when it has printed `until`."""
    process = launches.start(folder, *standalone(ranks), *SIMULATE, *SAVED, *arguments)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if until in line:
            return process
    raise AssertionError("".join(lines))


def kill(process: subprocess.Popen[str], *, launcher: bool = True, rank: int | None = None) -> None:
    """SIGKILL to the launcher and all of its ranks, as when the machine stops, or to one rank only."""
    ranks = children_of(process)
    for each in ([process.pid] if launcher else []) + (ranks if rank is None else [ranks[rank]]):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0


def end(launches: Launches, folder: Path, *arguments: str, out: str = "out") -> list[dict[str, Any]]:
    """The rounds of the run in one process, after its end."""
    process = launches.start(folder, *PYTHON, *SIMULATE, "--out", out, *arguments)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    (seed,) = json.loads(output[output.index("{") :])["seeds"]
    assert seed["status"] == "completed"
    return [{**done, "seconds": 0.0} for done in seed["rounds"]]


@pytest.mark.slow
def test_ranks_and_workers_may_change(launches: Launches, tmp_path: Path) -> None:
    """Two ranks, then three, then two workers, each killed, then one process: the run that was never stopped."""
    (tmp_path / "run.toml").write_text(RUN.replace("ROUNDS", "30"))
    kill(started(launches, tmp_path, *DISTRIBUTED, ranks=2, until="round 5:"))
    again = started(launches, tmp_path, *DISTRIBUTED, "--continue", ranks=3, until=": 4 clients")
    kill(again, launcher=False, rank=1)
    assert again.returncode == 1
    kill(started(launches, tmp_path, "--workers", "2", "--continue", ranks=0, until=": 4 clients"))
    found = end(launches, tmp_path, "--workers", "1", "--continue")
    assert found == end(launches, tmp_path, "--workers", "1", out="whole")
    models = [(tmp_path / out / "seed-0" / "model.safetensors").read_bytes() for out in ("out", "whole")]
    assert models[0] == models[1]
    assert len({done["digest"] for done in found}) == 30


@pytest.mark.slow
def test_ranks_in_lockstep_may_not_change(launches: Launches, tmp_path: Path) -> None:
    """The groups of lockstep are those of a rank, so another number of ranks has other bits and is refused."""
    (tmp_path / "run.toml").write_text(RUN.replace("ROUNDS", "1000"))
    kill(started(launches, tmp_path, "--distributed", *LOCKSTEP, ranks=2, until="round 3:"))
    process = launches.start(tmp_path, *PYTHON, *SIMULATE, "--out", "out", "--continue", *LOCKSTEP)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "cannot be continued with the same results: engine.ranks was 2 and is None" in errors
