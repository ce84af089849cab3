"""A simulated run has the models of the networked run bit for bit, and so has a replay of its ledger."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import algorithms as fl
from algorithms.averaging import mean_of
from fl_ops.commands.cli import app
from tests.marks import slow_except
from tests.processes.federation import Coordinator, Daemon, Fleet
from tests.processes.process import HERE, Workspace
from tests.processes.simulated import replay, simulated_rounds, simulation

BERNOULLI = {"sampling": "bernoulli", "rate": 0.5, "clients_per_round": None}


Round = tuple[str, dict[str, float], float | None]
"""Digest, evaluation and training loss."""


@pytest.fixture(autouse=True)
def _task_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the daemons' task importable here."""
    monkeypatch.syspath_prepend(HERE)


def simulated(name: str, **sections: Any) -> list[Round]:
    """Digest, evaluation and training loss of each round of the same run, simulated in this process."""
    rounds = simulated_rounds(name, **sections)
    return [(done.digest or "", dict(done.metrics), done.training_loss) for done in rounds]


def over_the_wire(server: Coordinator, name: str) -> list[Round]:
    """The same values of a completed run of a coordinator."""
    server.completed(name)
    return [(done.model_digest, dict(done.metrics), done.training_loss) for done in server.rounds(name)]


@pytest.mark.parametrize("method", slow_except(fl.names(), "scaffold", "mime"))
def test_a_simulated_run_is_the_networked_run(fleet: Fleet, method: str) -> None:
    """Models and numbers are equal for every method, because both use the same code."""
    population = 3 if fl.build(method).needs_population else 0
    local = {"weight_decay": 0.01, "max_gradient_norm": 1.0, "learning_rate_decay": 0.9}
    sections = {"algorithm": {"name": method}, "population": population, "local": local, "stop": {"rounds": 3}}
    fleet.server.create(f"wire-{method}", **sections)
    assert simulated(f"wire-{method}", **sections) == over_the_wire(fleet.server, f"wire-{method}")


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"algorithm": {"name": "fedavgm"}, "round": BERNOULLI}, id="bernoulli"),
        pytest.param(
            {"algorithm": {"name": "mimelite"}, "round": {"clip_update_norm": 0.1}},
            id="clipped",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"algorithm": {"name": "feddyn"}, "population": 3, "round": {"clip_update_norm": 0.1}}, id="clipped-states"
        ),
        pytest.param(
            {
                "algorithm": {"name": "scaffold", "parameters": {"objective": "examples"}},
                "population": 3,
                "population_examples": 150,
            },
            id="weighted-objective",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"algorithm": {"name": "fedrobust", "parameters": {"L": "matrix"}}},
            id="matrix-on-the-device",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"algorithm": {"name": "fedyogi", "parameters": {"v0": 1e-6, "eta_g": 0.01}}, "stop": {"rounds": 2}},
            id="v0",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"stop": {"patience": 1, "metric": "accuracy", "rounds": 20}}, id="no-improvement", marks=pytest.mark.slow
        ),
        pytest.param(
            {"round": {"clients_per_round": 3, "quorum": 3, "reducer": "median"}}, id="median", marks=pytest.mark.slow
        ),
        pytest.param(
            {"algorithm": {"name": "mime"}, "stop": {"rounds": 6}}, id="limits-by-default", marks=pytest.mark.slow
        ),
        pytest.param(
            {"algorithm": {"name": "fedavg"}, "round": {"clients_per_round": 3, "max_client_share": 0.3}},
            id="shares",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_simulated_and_networked_runs_agree_with_other_settings(
    fleet: Fleet, request: pytest.FixtureRequest, sections: dict[str, Any]
) -> None:
    """They agree for cohorts of any size, for clipped deltas and their states, and for the end by a stop rule."""
    name = f"wire-{request.node.callspec.id}"
    fleet.server.create(name, **sections)
    assert simulated(name, **sections) == over_the_wire(fleet.server, name)


@pytest.mark.slow  # other clips are simulated above and replayed in test_encodings
def test_a_limit_relative_to_earlier_norms_is_simulated_and_replayed(fleet: Fleet) -> None:
    """The clip factors depend on earlier rounds. They are equal in run, simulation and replay, and some are below 1."""
    plain = {"clients_per_round": 3}
    sections = {"algorithm": {"name": "fedavg"}, "stop": {"rounds": 6}}
    limited = {**sections, "round": {**plain, "max_relative_norm": 1.0, "over_relative_norm": "clip"}}
    fleet.server.create("wire-relative", **limited)
    came = simulated("wire-relative", **limited)
    assert came == over_the_wire(fleet.server, "wire-relative")
    unlimited = simulated("wire-relative", **sections, round=plain)
    assert (came[:3] == unlimited[:3], came[-1] == unlimited[-1]) == (True, False)
    result = replay(fleet.server, "wire-relative")
    assert result.exit_code == 0, result.output


def test_an_averaged_model_is_simulated_exported_and_replayed(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics, bits and digests of the averaged model are equal; a replay makes it too, and fails on another one."""
    stop = {"metric": "averaged_loss", "patience": 9}
    sections: dict[str, Any] = {"averaging": {"method": "window", "window": 2}, "stop": stop}
    server, path = fleet.server, tmp_path / "averaged.safetensors"
    server.create("wire-averaged", **sections)
    with simulation("wire-averaged", **sections) as here:
        rounds = [(done.digest, dict(done.metrics), done.training_loss) for done in here.rounds()]
        averaged, digest = here.averaged_model(), here.federation.averaged_digest
    assert rounds == over_the_wire(server, "wire-averaged")
    assert server.rounds("wire-averaged")[-1].averaged_digest == digest != ""
    options = [
        "--model",
        "averaged",
        "--out",
        str(path),
        "--server",
        str(server.settings["admin_listen"]),
        "--insecure",
    ]
    result = CliRunner().invoke(app, ["export", "wire-averaged", *options])
    assert result.exit_code == 0, result.output
    assert "averaged model of round" in result.output
    exported = load_file(path)
    assert averaged is not None
    assert exported.keys() == averaged.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in averaged.items())
    result = replay(server, "wire-averaged")
    assert result.exit_code == 0, result.output
    monkeypatch.setattr("fl_server.store.checkpoint_files.mean_of", lambda *of: mean_of(*of).mul_(1.001))
    result = replay(server, "wire-averaged")
    assert result.exit_code == 1
    assert "round 0: 2 clients, same model, ANOTHER averaged model: expected blake3:" in result.output


@pytest.mark.parametrize("model", slow_except(["batchnorm", "frozen"], "batchnorm"))
def test_buffers_and_frozen_parts(workspace: Workspace, model: str) -> None:
    """Models with buffers and frozen parts are equal too, and averaged ones with statistics that are computed anew."""
    averaging = {"method": "ema", "decay": 0.5, "statistics": "estimated"}
    server, options = Coordinator(workspace).serve(), {"model": model}
    for index in range(3):
        shard = {"partition": {"method": "iid", "clients": 3, "seed": 1}, "index": index}
        Daemon(workspace, server, f"edge-{index}", options=options, shard=shard).start()
    sections = {"task": {"options": options}, "stop": {"rounds": 2}, "averaging": averaging}
    server.create(model, **sections)
    assert simulated(model, **sections) == over_the_wire(server, model)


@pytest.mark.slow  # the test below kills a daemon and replays the run, too
def test_a_run_that_lost_a_daemon_is_replayed(fleet: Fleet) -> None:
    """First arrivals close the rounds, and a daemon dies during training. The accepted lists give the same models."""
    fleet.hold()
    fleet.server.create("replayed", round={"close": "goal", "over_selection": 1.5, "min_clients": 2})
    fleet.server.until("replayed", lambda status: len(status.cohort) == 3, "it draws three for two")
    fleet["edge-1"].logged("assignment", run="replayed", round=0)
    fleet["edge-1"].kill()
    fleet.release()
    digests = fleet.server.digests("replayed")
    assert fleet.server.rounds("replayed")[0].dropped == 1
    result = replay(fleet.server, "replayed")
    assert result.exit_code == 0, result.output
    assert all(f"round {number}: 2 clients, same model, {digest}" in result.output
               for number, digest in enumerate(digests))  # fmt: skip


def test_lost_states_are_replayed(fleet: Fleet) -> None:
    """A daemon that lost its state starts a new state epoch, and so does the replay."""
    fleet.hold()
    fleet.server.create("new-epoch", algorithm={"name": "scaffold"}, population=3, round={"clients_per_round": 3})
    fleet.server.until("new-epoch", lambda status: len(status.cohort) == 3, "it draws all")
    with fleet.server.admin() as admin:
        admin.runs.pause_run("new-epoch")
        fleet.release()
        fleet.server.until("new-epoch", lambda status: status.rounds_done == 1, "it commits one round and waits")
        fleet["edge-2"].kill()
        shutil.rmtree(fleet["edge-2"].settings["state_dir"])
        fleet["edge-2"].start()
        admin.runs.resume_run("new-epoch")
    fleet.server.completed("new-epoch")
    assert "states_restarted" in fleet.server.history("new-epoch")
    result = replay(fleet.server, "new-epoch")
    assert result.exit_code == 0, result.output


def test_ids_and_shards_come_from_the_daemons_files(fleet: Fleet, tmp_path: Path) -> None:
    """With --client-configs ids and shards come from the files of the running daemons."""
    fleet.server.create("by-files")
    fleet.server.completed("by-files")
    configs = tmp_path / "configs"
    configs.mkdir()
    for daemon in fleet.daemons.values():
        (configs / daemon.config.name).write_text(daemon.config.read_text())
    result = replay(fleet.server, "by-files", "--client-configs", str(configs), seed=2)
    assert result.exit_code == 0, result.output


def test_a_replay_with_other_data_differs(fleet: Fleet) -> None:
    """Exit code 1 at the first different round, with its number and the clients with different updates."""
    fleet.server.create("other-data")
    fleet.server.completed("other-data")
    result = replay(fleet.server, "other-data", seed=2)
    assert result.exit_code == 1
    assert "round 0: 2 clients, ANOTHER model" in result.output
    assert "; the updates of edge-" in result.output
    assert "round 1:" not in result.output
