"""`fl track` and `fl simulate --tensorboard` against TensorBoard's and MLflow's own readers, with the digits task."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import TIMEOUT_S, Workspace, eventually, run_fl
from tests.processes.tracker_readers import (
    Values,
    as_float32,
    mlflow_client,
    mlflow_run,
    mlflow_values,
    shown_values,
    tensorboard_values,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own imports

TASK: dict[str, Any] = {"name": "digits", "options": {"client_eval_fraction": 0.2}}
DIGITS: dict[str, Any] = {
    "task": TASK,
    "round": {"clients_per_round": 2, "min_clients": 2},
    "evaluation": {"clients_every": 2},
}
PARTITION = {"method": "dirichlet", "clients": 2, "seed": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator and two daemons with shards of digits."""
    with Workspace(tmp_path_factory.mktemp("trackers")) as workspace:
        coordinator = Coordinator(workspace).serve()
        for index in range(2):
            shard = {"partition": PARTITION, "index": index}
            Daemon(workspace, coordinator, f"edge-{index}", shard=shard, task=TASK).start()
            coordinator.until_present(f"edge-{index}")
        yield coordinator


class Tracking:
    """`fl track` as a process, with its lines in a file."""

    def __init__(self, process: subprocess.Popen[bytes], file: Path) -> None:
        self.process, self._file = process, file

    def shows(self, text: str) -> None:
        """Wait until a text was printed. Fails at once if the process ends without it."""

        def probe() -> bool:
            ended, printed = self.process.poll() is not None, self._file.read_text()
            assert text in printed or not ended, f"ended with {self.process.returncode}: {printed}"
            return text in printed

        eventually(probe, f"fl track shows {text}")


@contextmanager
def tracking(server: Coordinator, folder: Path, *arguments: str) -> Iterator[Tracking]:
    """Start `fl track`; it is ended with the context."""
    command = [sys.executable, "-m", "fl_ops", "track", *arguments, *at(server)]
    file = folder / "track.txt"
    with (
        file.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=folder) as process,
    ):
        try:
            yield Tracking(process, file)
        finally:
            process.kill()


def at(server: Coordinator) -> list[str]:
    """The connection options."""
    return ["--insecure", "--server", str(server.settings["admin_listen"])]


def shown(server: Coordinator, run: str, folder: Path) -> Values:
    """The numbers of `fl run show --json`."""
    return shown_values(run_fl("run", "show", run, "--json", *at(server), folder=folder).stdout)


@pytest.mark.slow
def test_the_readers_find_the_numbers_of_the_ledger(server: Coordinator, tmp_path: Path) -> None:
    """A run is tracked live at both places; a second call adds nothing; MLflow has settings, state and models."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run = server.create("both", **DIGITS, stop={"rounds": 3}, averaging={"method": "ema", "decay": 0.5})
    options = [run, "--tensorboard", "runs", "--mlflow", uri, *at(server)]
    first = run_fl("track", *options, folder=tmp_path)
    assert first.returncode == 0, first.stderr
    expected = shown(server, run, tmp_path)
    some = {"evaluation/accuracy", "evaluation/averaged_accuracy", "clients/accuracy_mean", "norms/cosine"}
    assert {*some, "seconds/collecting"} <= {name for name, _ in expected}
    assert mlflow_values(uri, run) == expected
    assert tensorboard_values(tmp_path / "runs" / run) == as_float32(expected)
    entry = mlflow_run(uri, run)
    assert (entry.info.status, entry.data.tags["impetus.state"]) == ("FINISHED", "completed")
    assert entry.data.params["algorithm.parameters.alpha"] == "0.2"
    models = {each.path for each in mlflow_client(uri).list_artifacts(entry.info.run_id, "model")}
    names = ("best", "best-averaged", "latest", "latest-averaged")
    assert models == {f"model/{name}.safetensors" for name in names}
    averaged = mlflow_client(uri).download_artifacts(entry.info.run_id, "model/latest-averaged.safetensors")
    with safe_open(averaged, framework="pt") as file:
        assert file.metadata()["holds"] == "averaged"
    assert "0 new values" in run_fl("track", *options, folder=tmp_path).stdout
    assert (mlflow_values(uri, run), len(tensorboard_values(tmp_path / "runs" / run))) == (expected, len(expected))


@pytest.mark.slow
def test_a_killed_tracking_goes_on(server: Coordinator, tmp_path: Path) -> None:
    """SIGKILL after some rounds; the second call adds the others, and survives a restart of the coordinator."""
    uri = (tmp_path / "mlruns").as_uri()
    run = server.create("killed", **DIGITS, stop={"rounds": 400})
    options = [run, "--tensorboard", "runs", "--mlflow", uri]
    with tracking(server, tmp_path, *options) as first:
        first.shows("round 2, ")
        first.process.send_signal(signal.SIGKILL)
        assert first.process.wait(TIMEOUT_S) == -signal.SIGKILL
    before = tensorboard_values(tmp_path / "runs" / run)
    assert before
    with tracking(server, tmp_path, *options) as second:
        second.shows("round ")
        server.kill()
        second.shows("connection lost")
        server.serve()
        done = server.run(run).rounds_done
        server.until(run, lambda status: status.rounds_done > done, "another round")
        with server.admin() as admin:
            admin.runs.stop_run(run, "enough")
        assert second.process.wait(TIMEOUT_S) == 0
    expected = shown(server, run, tmp_path)
    assert mlflow_values(uri, run) == expected
    assert tensorboard_values(tmp_path / "runs" / run) == as_float32(expected)
    assert mlflow_run(uri, run).info.status == "KILLED"
    assert before.items() <= as_float32(expected).items()


@pytest.mark.slow
def test_a_simulation_has_the_numbers_of_the_networked_run(server: Coordinator, tmp_path: Path) -> None:
    """Every value of the simulated run is that of the coordinator's run, times apart.

    Bytes of the model that clients evaluate belong to the next round of a coordinator, and to the same simulated one.
    """
    server.create("wire", **DIGITS, stop={"rounds": 2})
    server.completed("wire")
    run_fl("track", "wire", "--once", "--tensorboard", "runs", *at(server), folder=tmp_path)
    (tmp_path / "run.toml").write_text(FILE)
    done = run_fl("simulate", "run.toml", "--workers", "1", "--tensorboard", "runs", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").glob("wire-seed-7-*")
    every, networked = tensorboard_values(folder), tensorboard_values(tmp_path / "runs" / "wire")
    simulated = {(name, step): every[name, step] for name, step in every if name not in OTHER}
    assert simulated.items() <= networked.items()
    assert {"bytes/up", "evaluation/accuracy", "training/loss", "cohort/accepted"} <= {name for name, _ in simulated}


OTHER = {"seconds/round", "bytes/down"}
FILE = """
name = "wire"
seed = 7
task = { name = "digits", options = { client_eval_fraction = 0.2 } }
algorithm = { name = "fedcm", parameters = { alpha = 0.2 } }
local = { learning_rate = 0.2, epochs = 1, batch_size = 16 }
round = { clients_per_round = 2, min_clients = 2 }
stop = { rounds = 2 }
evaluation = { clients_every = 2 }
simulation = { clients = 2, names = "edge-{index}", partition = { method = "dirichlet", seed = 1 } }
"""
