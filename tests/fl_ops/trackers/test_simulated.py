"""`fl simulate` and `fl compare` with trackers."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest

from fl_ops.errors import OpsError, Refused
from fl_ops.trackers.facts import EndFacts, RoundFacts, RunFacts
from fl_ops.trackers.opening import Trackers
from fl_ops.trackers.simulated import OpenRuns
from tests.fl_ops.conftest import Fl
from tests.processes.tracker_readers import (
    Values,
    as_float32,
    mlflow_client,
    mlflow_run,
    mlflow_values,
    tensorboard_values,
)

pytestmark = [
    pytest.mark.usefixtures("points_task"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of MLflow's own imports
]

FILE = """
[task]
name = "points:Points"
[local]
learning_rate = 0.2
[stop]
rounds = 2
[simulation]
clients = 3
[simulation.measure.sharpness]
examples = 20
probes = 2
iterations = 3
"""
TABLE = """
seeds = [1]
task = { name = "points:Points" }
simulation = { clients = 3, measure = { sharpness = { examples = 20, probes = 2, iterations = 3 } } }
local = { learning_rate = 0.2 }
stop = { rounds = 2 }
splits = { even = { method = "iid" } }
report = { target = 0.5, last = 1 }
[[methods]]
label = "FedAvg"
name = "fedavg"
"""


def in_file(path: Path) -> Values:
    """The values of a results file whose names are plain."""
    names = {"training_loss": "training/loss", "accuracy": "evaluation/accuracy", "loss": "evaluation/loss"}
    names |= {"bytes_down": "bytes/down", "bytes_up": "bytes/up"}
    names |= {
        "clients_training_accuracy_std": "clients/training_accuracy_std",
        "hessian_trace": "flatness/hessian_trace",
    }
    rows = list(csv.DictReader(path.read_text().splitlines()))
    return {(names[key], int(row["round"])): float(row[key]) for row in rows for key in names if row.get(key)}


def test_seeds_and_again(fl: Fl, tmp_path: Path) -> None:
    """Each seed is a run with the numbers of its file and its models; --continue of ended runs adds nothing."""
    (tmp_path / "run.toml").write_text(f'{FILE}[averaging]\nmethod = "tail"\nstart = 0\n')
    uri = (tmp_path / "mlruns").as_uri()
    options = ("simulate", "run.toml", "--seeds", "0,1", "--workers", "1", "--out", "out",
               "--mlflow", uri, "--tensorboard", "runs")  # fmt: skip
    assert fl(*options).exit_code == 0
    assert fl(*options, "--continue").exit_code == 0
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name.rpartition("-")[0] for folder in folders] == [f"points-Points-fedcm-seed-{n}" for n in (0, 1)]
    for seed, folder in enumerate(folders):
        expected = in_file(tmp_path / "out" / f"seed-{seed}" / "rounds.csv")
        assert {("clients/training_accuracy_std", 1), ("flatness/hessian_trace", 1)} <= expected.keys()
        assert as_float32(expected).items() <= tensorboard_values(folder).items()
        assert expected.items() <= mlflow_values(uri, folder.name).items()
        run = mlflow_run(uri, folder.name)
        assert (run.info.status, run.data.params["seed"]) == ("FINISHED", str(seed))
        models = {artifact.path for artifact in mlflow_client(uri).list_artifacts(run.info.run_id, "model")}
        assert models == {"model/averaged.safetensors", "model/model.safetensors"}
        assert any(name == "evaluation/averaged_loss" for name, _ in mlflow_values(uri, folder.name))


@pytest.mark.slow
def test_cells_of_a_comparison(fl: Fl, tmp_path: Path) -> None:
    """Each cell is a run with the numbers of results.csv; finished cells are tracked by a later call, too."""
    (tmp_path / "small.toml").write_text(TABLE)
    assert fl("compare", "small.toml", "--out", "out", "--tensorboard", "live").exit_code == 0
    assert fl("compare", "small.toml", "--out", "out", "--tensorboard", "later", "--no-run").exit_code == 0
    (live,), (later,) = ((tmp_path / name).iterdir() for name in ("live", "later"))
    assert live.name.startswith("FedAvg-even-final-seed-1-")
    assert tensorboard_values(live) == tensorboard_values(later)
    expected, found = in_file(tmp_path / "out" / "results.csv"), tensorboard_values(live)
    assert ("flatness/hessian_trace", 1) in expected
    assert expected == pytest.approx({key: found[key] for key in expected}, abs=1e-4)  # the file has fewer digits


def test_a_replay_is_not_tracked(fl: Fl) -> None:
    """It has no numbers of its own."""
    done = fl("simulate", "run.toml", "--replay", "r-1", "--state-dir", ".", "--tensorboard", "runs")
    assert done.exit_code == 2
    assert "fl track" in done.stderr


RUN = RunFacts("run", "run", {})
END = EndFacts("completed", "", 9.0)


def rounds(count: int) -> Sequence[RoundFacts]:
    """Rounds with a value each."""
    return [RoundFacts(number, 1.0 + number, {"a/b": 0.5}) for number in range(count)]


def test_a_place_that_fails_at_the_start(tmp_path: Path) -> None:
    """A wrong place ends the command before the work."""
    (tmp_path / "file").write_text("")
    with OpenRuns(Trackers(tmp_path / "file"), print) as runs, pytest.raises(OpsError, match="cannot be written"):
        runs.write("key", RUN, [])


def test_a_place_that_fails_in_between(tmp_path: Path) -> None:
    """The work goes on with a note; what was missed is written when the place is back, or reported in the end."""
    notes: list[str] = []
    with OpenRuns(Trackers(tmp_path), notes.append) as runs:
        runs.write("a", RUN, rounds(1))
        runs.end("a", RUN, END)
        with Trackers(tmp_path).opened(RUN):  # another process
            runs.write("a", RUN, rounds(2))
            runs.write("a", RUN, rounds(3))
        assert len(notes) == 1
        with pytest.raises(Refused, match="1 run not tracked"):
            runs.check()
        runs.write("a", RUN, rounds(3))
        runs.end("a", RUN, END)
        runs.check()
    assert tensorboard_values(tmp_path / "run") == {("a/b", number): 0.5 for number in range(3)}
