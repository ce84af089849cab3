"""A run without network has the models of the run over the wire, bit for bit; so has one done again from its ledger."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import algorithms as fl
from fl_ops.cli import app
from fl_ops.simulate.clients import deal
from fl_ops.simulate.settings import Plan, SimulationSection
from fl_ops.simulate.simulation import Simulation
from fl_server.run_config import from_spec
from tests.integration.harness import TASK, Coordinator, Daemon, run_spec

CLIENTS = {"clients": 3, "names": "edge-{index}", "partition": {"method": "iid", "seed": 1}}
BERNOULLI = {"sampling": "bernoulli", "rate": 0.5, "clients_per_round": None}


@pytest.fixture(autouse=True)
def _task_at_hand(monkeypatch):
    """The daemons' task can be imported here too."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


def simulated(name, **sections):
    """Digest, evaluation and training loss of each round of the same run, done in this process."""
    plan = Plan(from_spec(run_spec(name, **sections)), SimulationSection(**CLIENTS))
    dealt = deal(plan, plan.config.seed)
    with Simulation(dealt.config, dealt.clients, task=dealt.evaluated) as simulation:
        return [(done.digest, dict(done.metrics), done.training_loss) for done in simulation.rounds()]


def over_the_wire(server, name):
    """The same of a run of a coordinator, once it has come to its proper end."""
    server.completed(name)
    return [(done.model_digest, dict(done.metrics), done.training_loss) for done in server.rounds(name)]


@pytest.mark.parametrize("method", fl.names())
def test_a_simulated_run_is_the_networked_run(fleet, method):
    """Model for model and number for number, for every method: it is the same code."""
    population = 3 if fl.build(method).needs_population else 0
    local = {"weight_decay": 0.01, "max_gradient_norm": 1.0, "learning_rate_decay": 0.9}
    sections = {"algorithm": {"name": method}, "population": population, "local": local, "stop": {"rounds": 3}}
    fleet.server.create(f"wire-{method}", **sections)
    assert simulated(f"wire-{method}", **sections) == over_the_wire(fleet.server, f"wire-{method}")


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"algorithm": {"name": "fedavgm"}, "round": BERNOULLI}, id="bernoulli"),
        pytest.param({"algorithm": {"name": "mimelite"}, "round": {"clip_update_norm": 0.1}}, id="clipped"),
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
        ),
        pytest.param({"stop": {"patience": 1, "metric": "accuracy", "rounds": 20}}, id="out-of-patience"),
        pytest.param({"round": {"clients_per_round": 3, "quorum": 3, "reducer": "median"}}, id="median"),
        pytest.param({"algorithm": {"name": "mime"}, "stop": {"rounds": 6}}, id="limits-by-default"),
        pytest.param(
            {"algorithm": {"name": "fedavg"}, "round": {"clients_per_round": 3, "max_client_share": 0.3}}, id="shares"
        ),
    ],
)
def test_so_it_is_with_other_settings(fleet, request, sections):
    """Cohorts of any size, deltas that are clipped and the states that follow them, and the end by a stop rule."""
    name = f"wire-{request.node.callspec.id}"
    fleet.server.create(name, **sections)
    assert simulated(name, **sections) == over_the_wire(fleet.server, name)


def test_a_limit_beside_earlier_norms_is_simulated_and_replayed(fleet, tmp_path):
    """Who is clipped by how much depends on earlier rounds, and is the same here, there and again; it does clip."""
    plain = {"clients_per_round": 3}
    sections = {"algorithm": {"name": "fedavg"}, "stop": {"rounds": 6}}
    limited = {**sections, "round": {**plain, "max_relative_norm": 1.0, "over_relative_norm": "clip"}}
    fleet.server.create("wire-relative", **limited)
    came = simulated("wire-relative", **limited)
    assert came == over_the_wire(fleet.server, "wire-relative")
    unlimited = simulated("wire-relative", **sections, round=plain)
    assert (came[:3] == unlimited[:3], came[-1] == unlimited[-1]) == (True, False)
    result = replayed(fleet, "wire-relative", tmp_path)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("model", ["batchnorm", "frozen"])
def test_buffers_and_frozen_parts(place, model):
    """Models that are more than what is trained are the same ones too."""
    server, options = Coordinator(place).serve(), {"model": model}
    for index in range(3):
        shard = {"partition": {"method": "iid", "clients": 3, "seed": 1}, "index": index}
        Daemon(place, server, f"edge-{index}", options=options, shard=shard).start()
    server.create(model, task={"options": options}, stop={"rounds": 2})
    assert simulated(model, task={"options": options}, stop={"rounds": 2}) == over_the_wire(server, model)


def replayed(fleet, run, folder, *options, seed=1):
    """`fl simulate --replay` of a run of the fleet."""
    config = folder / "clients.toml"
    config.write_text(
        f'[task]\nname = "{TASK}"\n[simulation]\nclients = 3\nnames = "edge-{{index}}"\n'
        f'partition = {{ method = "iid", seed = {seed} }}\n'
    )
    state = fleet.server.settings["state_dir"]
    return CliRunner().invoke(app, ["simulate", str(config), "--replay", run, "--state-dir", state, *options])


def test_a_run_that_lost_a_daemon_is_replayed(fleet, tmp_path):
    """First arrivals make the rounds and a daemon dies in mid-training: the accepted lists give the same models."""
    fleet.hold()
    fleet.server.create("replayed", round={"close": "goal", "over_selection": 1.5, "min_clients": 2})
    fleet.server.until("replayed", lambda status: len(status.cohort) == 3, "it draws three for two")
    fleet["edge-1"].logged("assignment", run="replayed", round=0)
    fleet["edge-1"].kill()
    fleet.release()
    digests = fleet.server.digests("replayed")
    assert fleet.server.rounds("replayed")[0].dropped == 1
    result = replayed(fleet, "replayed", tmp_path)
    assert result.exit_code == 0, result.output
    assert all(f"round {number}: 2 clients, same model, {digest}" in result.output
               for number, digest in enumerate(digests))  # fmt: skip


def test_lost_states_are_replayed(fleet, tmp_path):
    """A daemon that has lost its state in mid-run begins a new epoch of states: a replay begins it too."""
    fleet.hold()
    fleet.server.create("new-epoch", algorithm={"name": "scaffold"}, population=3, round={"clients_per_round": 3})
    fleet.server.until("new-epoch", lambda status: len(status.cohort) == 3, "it draws all")
    with fleet.server.admin() as admin:
        admin.pause_run("new-epoch")
        fleet.release()
        fleet.server.until("new-epoch", lambda status: status.rounds_done == 1, "it commits one round and waits")
        fleet["edge-2"].kill()
        shutil.rmtree(fleet["edge-2"].settings["state_dir"])
        fleet["edge-2"].start()
        admin.resume_run("new-epoch")
    fleet.server.completed("new-epoch")
    assert "states_restarted" in fleet.server.history("new-epoch")
    result = replayed(fleet, "new-epoch", tmp_path)
    assert result.exit_code == 0, result.output


def test_daemons_files_say_who_the_clients_are(fleet, tmp_path):
    """With --client-configs ids and shards come from the files that the daemons run by, while they run."""
    fleet.server.create("by-files")
    fleet.server.completed("by-files")
    configs = tmp_path / "configs"
    configs.mkdir()
    for daemon in fleet.daemons.values():
        (configs / daemon.config.name).write_text(daemon.config.read_text())
    result = replayed(fleet, "by-files", tmp_path, "--client-configs", str(configs), seed=2)
    assert result.exit_code == 0, result.output


def test_other_data_give_another_model(fleet, tmp_path):
    """Exit code 1 at the first round that differs, with its number and the clients whose updates do."""
    fleet.server.create("other-data")
    fleet.server.completed("other-data")
    result = replayed(fleet, "other-data", tmp_path, seed=2)
    assert result.exit_code == 1
    assert "round 0: 2 clients, ANOTHER model" in result.output
    assert "other updates than theirs came of edge-" in result.output
    assert "round 1:" not in result.output
