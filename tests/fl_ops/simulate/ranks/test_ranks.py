"""`fl simulate --distributed`: real processes of torchrun on loopback have the bits of one process."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fl_ops.simulate.ranks.launch import PYTHON, SIMULATE, Launches, children_of, standalone
from tests.processes.process import eventually

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
[simulation.measure]
every = 2
sharpness = { examples = 30, probes = 2, iterations = 5 }
"""
MEASURES = {"clients_training_accuracy_std", "clients_training_loss_worst_decile", "hessian_largest", "sharpness"}
"""Some of what it measures."""


def rounds(launches: Launches, folder: Path, *arguments: str, ranks: int) -> list[tuple[Any, ...]]:
    """Model, metrics, measures and bytes of each round of each seed."""
    process = launches.start(folder, *standalone(ranks), *SIMULATE, *arguments)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    seeds = json.loads(output[output.index("{") :])["seeds"]
    keys = ("digest", "training_loss", "metrics", "measured", "bytes_down", "bytes_up")
    return [tuple(done.get(key) for key in keys) for seed in seeds for done in seed["rounds"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "ranks", "workers"), [("scaffold", 2, "2"), pytest.param("fedcm", 1, "1", marks=pytest.mark.slow)]
)
def test_the_command_has_the_bits_of_one_process(
    launches: Launches, tmp_path: Path, method: str, ranks: int, workers: str
) -> None:
    """Two seeds, client states, clipping, evaluation on clients, training accuracy and flatness."""
    (tmp_path / "run.toml").write_text(RUN.replace("METHOD", method))
    expected = rounds(launches, tmp_path, "--seeds", "0,1", "--workers", "1", ranks=0)
    assert len({done[0] for done in expected}) == 6
    assert [bool(done[3]) for done in expected] == [False, True, True] * 2
    assert all(done[3].keys() >= MEASURES for done in expected if done[3])
    assert rounds(launches, tmp_path, "--seeds", "0,1", "--distributed", "--workers", workers, ranks=ranks) == expected


@pytest.mark.slow
def test_metrics_from_sums_have_the_bits_of_one_process(launches: Launches, tmp_path: Path) -> None:
    """The sums of the clients of both ranks, and those of the server's data in parts."""
    scored = RUN.replace("points:Points", "tests.processes.scored_task:Scored").replace("part = 0.25", "kept = 10")
    (tmp_path / "run.toml").write_text(scored.replace("METHOD", "fedavg").replace("_every = 2", "_every = 1"))
    expected = rounds(launches, tmp_path, "--workers", "1", ranks=0)
    assert {"f1_macro", "perplexity", "clients_f1_macro", "clients_recalls/0"} <= set(expected[0][2])
    assert rounds(launches, tmp_path, "--distributed", "--workers", "1", ranks=2) == expected


@pytest.mark.slow
def test_ranks_with_different_files_are_refused(launches: Launches, tmp_path: Path) -> None:
    """Rank 1 has another learning rate. The error names the rank and what must be equal."""
    (tmp_path / "run.toml").write_text(RUN.replace("METHOD", "fedavg"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.toml").write_text(RUN.replace("METHOD", "fedavg").replace("0.2", "0.1"))
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 10_000)}
    processes = [
        launches.start(
            place, *PYTHON, *SIMULATE, "--distributed", "--workers", "1", variables={**address, "RANK": str(rank)}
        )
        for rank, place in enumerate((tmp_path, other))
    ]
    (_, first), (_, second) = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [2, 1]
    assert "rank 1 has others than rank 0" in first
    assert "another rank of this run ended" in second


@pytest.mark.slow
def test_without_torchrun_it_names_the_command(launches: Launches, tmp_path: Path) -> None:
    """A process that torchrun did not start exits with 2 and an example."""
    (tmp_path / "run.toml").write_text(RUN.replace("METHOD", "fedavg"))
    process = launches.start(tmp_path, *PYTHON, *SIMULATE, "--distributed")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "without RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in errors
    assert "torchrun --nproc-per-node 2 -m fl_ops simulate" in errors


@pytest.mark.slow
def test_no_rank_is_left_after_a_kill(launches: Launches, tmp_path: Path) -> None:
    """One rank is killed in the middle of a long run: all others end."""
    (tmp_path / "run.toml").write_text(RUN.replace("METHOD", "fedavg").replace("rounds = 3", "rounds = 100000"))
    process = launches.start(tmp_path, *standalone(2), *SIMULATE, "--distributed", "--workers", "1")
    ranks = eventually(lambda: found if len(found := children_of(process)) == 2 else None, "torchrun starts two ranks")
    assert process.stderr is not None
    while not process.stderr.readline().startswith("seed "):
        time.sleep(0.01)
    os.kill(ranks[1], signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
