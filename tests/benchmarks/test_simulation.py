"""The benchmark of simulations: its setting, its measure, and its table."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.simulation import setting
from benchmarks.simulation.__main__ import table
from benchmarks.simulation.contenders import ROOT, Options, Started, contenders
from benchmarks.simulation.measure import Failed, Measured, _of_a_round, measure
from benchmarks.simulation.peers.rounds import Rounds
from benchmarks.simulation.task import Cifar10Iid
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.settings import read_simulation
from fl_tasks import Shard

OPTIONS = Options(rounds=3, processes=1, device="cpu", environments=Path())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise for a thousand clients of two images."""
    monkeypatch.setenv("IMPETUS_DATA", "random")
    monkeypatch.setattr(setting, "IMAGES", 2)
    monkeypatch.setattr(setting, "EVALUATION_IMAGES", 7)


def test_the_model_is_that_of_pfl_research() -> None:
    """Two convolutions of 3x3 without padding, one pooling, 128 hidden units: 1,626,442 parameters."""
    model = setting.new_model()
    assert sum(each.numel() for each in model.parameters()) == 1_626_442
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_images_are_normalised_by_channel(tmp_path: Path) -> None:
    """By the training images' mean and deviation, in an order that keeps each label with its image."""
    images = np.arange(10 * 3 * 32 * 32, dtype=np.uint8).reshape(10, 3, 32, 32)
    images[:] = np.arange(10, dtype=np.uint8).reshape(10, 1, 1, 1) * np.array([1, 2, 3], np.uint8).reshape(1, 3, 1, 1)
    for name, array in {"images": images, "labels": np.arange(10), "eval_images": images, "eval_labels": []}.items():
        np.save(tmp_path / f"{name}.npy", np.asarray(array))
    data = setting.load_data(tmp_path)
    assert torch.allclose(data.inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-6)
    assert torch.allclose(data.inputs.std((0, 2, 3), correction=0), torch.ones(3))
    assert data.inputs[:, 0, 0, 0].argsort().tolist() == data.targets.argsort().tolist()


@pytest.mark.usefixtures("small")
def test_our_clients_have_the_images_of_the_peers_clients() -> None:
    """The run's file partitions the task's data into the same shards that the other libraries get."""
    config = read_simulation(ROOT / "benchmarks" / "simulation" / "cifar10.toml")
    run, data = prepare(config, seed=0), setting.load_data(Path("random"))
    assert len(run.clients) == setting.CLIENTS
    for index, client in list(enumerate(run.clients))[::333]:
        inputs, targets = data.client(index)
        assert torch.equal(run.clients[client].train.inputs, inputs)  # type: ignore[union-attr]
        assert torch.equal(run.clients[client].train.targets, targets)  # type: ignore[union-attr]


def test_our_run_has_the_hyperparameters_of_the_setting() -> None:
    """The run's file repeats the setting's numbers."""
    config = read_simulation(ROOT / "benchmarks" / "simulation" / "cifar10.toml")
    local, rounds = config.run.local, config.run.round
    assert (local.learning_rate, local.batch_size, local.epochs) == (setting.RATE, setting.BATCH, 1)
    assert (rounds.clients_per_round, config.simulation.clients) == (setting.COHORT, setting.CLIENTS)
    assert config.run.evaluation.every == setting.EVALUATION_EVERY


@pytest.mark.usefixtures("small")
def test_clients_hold_no_evaluation_data() -> None:
    """So that the shards are cut from one set in memory."""
    task = Cifar10Iid()
    assert len(task.eval_data()) == 7
    assert len(task.eval_data(Shard(torch.tensor([0])))) == 0


def test_a_peer_evaluates_every_tenth_and_the_last_round(tmp_path: Path) -> None:
    """As `every = 10` in our run: rounds count from 0."""
    rounds = Rounds(tmp_path / "rounds.csv", 25)
    assert [number for number in range(25) if rounds.evaluates(number)] == [9, 19, 24]


PROGRAM = """
import sys, time
from pathlib import Path
from benchmarks.simulation.peers.rounds import Rounds
rounds = Rounds(Path(sys.argv[1]), 3)
for number in range(3):
    until = time.process_time() + (0.3 if number else 1.5)
    while time.process_time() < until: pass
    rounds.ended(number, 0.5 if number == 2 else None)
time.sleep(0.5)
print("the end")
sys.exit(int(sys.argv[2]))
"""


def program(folder: Path, code: int) -> Started:
    """A contender of three rounds."""
    table = folder / "rounds.csv"
    return Started([sys.executable, "-c", PROGRAM, str(table), str(code)], table)


@pytest.mark.slow
def test_the_first_round_is_not_counted() -> None:
    """The first needs 1.5 s of processor time, each later one 0.3 s for 50 clients."""
    found = measure(lambda options, folder: program(folder, 0), OPTIONS, limit_s=60)
    assert 0 < found.clients_per_s <= 50 / 0.3
    assert 3 < found.cpu_ms_per_client < 15
    assert found.peak_bytes > 1 << 20
    assert found.accuracy == 0.5


@pytest.mark.slow
def test_a_failed_contender_is_reported_with_its_last_lines() -> None:
    """Even if all of its rounds were written."""
    with pytest.raises(Failed, match=r"exit code 3 after 3 of 3 rounds:\nthe end"):
        measure(lambda options, folder: program(folder, 3), OPTIONS, limit_s=60)


def test_a_contender_that_takes_too_long_is_ended() -> None:
    """The limit ends its processes."""
    with pytest.raises(Failed, match="not done after 0 s"):
        measure(lambda options, folder: program(folder, 0), OPTIONS, limit_s=0)


def test_an_evaluation_counts_a_tenth() -> None:
    """Rounds of 2 s and one of 12 s with an evaluation: 3 s, as for nine rounds of 2 s and one of 12 s."""
    assert _of_a_round([2.0, 2.0, 12.0], [False, False, True]) == 3.0


def test_rows_are_medians_and_paired_ratios() -> None:
    """The ratio is the median of 2/1, 6/2 and 4/4, not the ratio of the medians, 4/2."""

    def runs(*rates: float) -> list[Measured]:
        return [Measured(rate, rate, 1000 / rate, 1.0, 2_000_000, 0.5) for rate in rates]

    lines = table({"first": runs(1, 2, 4), "second": runs(2, 6, 4)})
    assert lines[2:] == [
        "| first | 2.00 | 1.00 | 2.00 | 500 ms | 1 s | 2 MB | 0.5000 |",
        "| second | 4.00 | 2.00 | 4.00 | 250 ms | 1 s | 2 MB | 0.5000 |",
    ]


def test_every_engine_is_measured_and_libraries_on_the_cpu_only() -> None:
    """A borrowed GPU reaches no package index."""
    names = list(contenders("cpu"))
    assert names == ["sequential", "workers", "batched", "pfl, 1 process", "pfl, processes", "flower"]
    assert set(contenders("cuda")) == {"sequential", "workers", "batched"}
