"""`fl simulate --distributed`: real processes of torchrun on loopback have the bits of one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.processes.process import eventually

ROOT = Path(__file__).parents[4]
TASKS = Path(__file__).parents[2]

_STARTED: list[subprocess.Popen[str]] = []

RUN = """
[task]
name = "points:Points"
options = { part = 0.25 }
[algorithm]
name = "METHOD"
[local]
learning_rate = 0.2
batch_size = 8
[round]
clients_per_round = 4
clip_update_norm = 0.2
[evaluation]
clients_every = 2
[stop]
rounds = 3
[simulation]
clients = 6
names = "c{index}"
"""


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Kill what a failed test has left. Ranks are in sessions of their own, so they do not end with their launcher."""
    yield
    for process in _STARTED:
        for each in [*(children_of(process) if process.poll() is None else []), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.communicate()
    _STARTED.clear()


def children_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that a running process has started."""
    return [int(one) for one in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def started(
    folder: Path, *arguments: str, ranks: int, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """`fl simulate` of the file run.toml in a folder, by torchrun if there are ranks."""
    environment = {
        **os.environ,
        **(variables or {}),
        "PYTHONPATH": f"{TASKS}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, "-m", "fl_ops", "simulate", "run.toml", "--json", *arguments]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    _STARTED.append(process)
    return process


def rounds(folder: Path, *arguments: str, ranks: int) -> list[tuple[Any, ...]]:
    """Model, metrics and bytes of each round of each seed."""
    process = started(folder, *arguments, ranks=ranks)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    seeds = json.loads(output[output.index("{") :])["seeds"]
    keys = ("digest", "training_loss", "metrics", "bytes_down", "bytes_up")
    return [tuple(done[key] for key in keys) for seed in seeds for done in seed["rounds"]]


MORE = [("scaffold", 4, "1"), *((name, 4, "1") for name in ("fedcm", "mime", "feddyn")), ("fedcm", 1, "1")]


@pytest.mark.parametrize(
    ("method", "ranks", "workers"),
    [("scaffold", 2, "2"), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_the_number_of_ranks_changes_no_bit(tmp_path: Path, method: str, ranks: int, workers: str) -> None:
    """One process, and several ranks: two seeds, client states, clipping, evaluation on clients."""
    (tmp_path / "run.toml").write_text(RUN.replace("METHOD", method))
    expected = rounds(tmp_path, "--seeds", "0,1", "--workers", "1", ranks=0)
    assert len({done[0] for done in expected}) == 6
    assert rounds(tmp_path, "--seeds", "0,1", "--distributed", "--workers", workers, ranks=ranks) == expected


def test_ranks_with_different_files_are_refused(tmp_path: Path) -> None:
    """Rank 1 has another learning rate. The error names the rank and what must be equal."""
    (tmp_path / "run.toml").write_text(RUN.replace("METHOD", "fedavg"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.toml").write_text(RUN.replace("METHOD", "fedavg").replace("0.2", "0.1"))
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 10_000)}
    processes = [
        started(place, "--distributed", "--workers", "1", ranks=0, variables={**address, "RANK": str(rank)})
        for rank, place in enumerate((tmp_path, other))
    ]
    (_, first), (_, second) = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [2, 1]
    assert "rank 1 has others than rank 0" in first
    assert "another rank of this run ended" in second


def test_without_torchrun_it_names_the_command(tmp_path: Path) -> None:
    """A process that torchrun did not start exits with 2 and an example."""
    (tmp_path / "run.toml").write_text(RUN.replace("METHOD", "fedavg"))
    process = started(tmp_path, "--distributed", ranks=0)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "without RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in errors
    assert "torchrun --nproc-per-node 2 -m fl_ops simulate" in errors


def test_no_rank_is_left_after_a_kill(tmp_path: Path) -> None:
    """One rank is killed in the middle of a long run: all others end."""
    (tmp_path / "run.toml").write_text(RUN.replace("METHOD", "fedavg").replace("rounds = 3", "rounds = 100000"))
    process = started(tmp_path, "--distributed", "--workers", "1", ranks=2)
    ranks = eventually(lambda: found if len(found := children_of(process)) == 2 else None, "torchrun starts two ranks")
    assert process.stderr is not None
    while not process.stderr.readline().startswith("seed "):
        time.sleep(0.01)
    os.kill(ranks[1], signal.SIGKILL)
    process.communicate(timeout=90)
    assert process.returncode != 0
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
