"""A task with its own training loop in real processes: killed servers and daemons, a replay, a simulation, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_ops.commands.cli import app
from fl_ops.errors import OpsError
from protos.fl.v1 import admin_pb2
from tests.processes.federation import Coordinator, Daemon, Fleet
from tests.processes.process import HERE, Workspace
from tests.processes.simulated import simulated_rounds

LOOP = "loop_task:Looped"
SECTIONS: dict[str, Any] = {
    "task": {"name": LOOP},
    "algorithm": {"name": "fedavgm"},
    "local": {"epochs": 2, "learning_rate": 0.01},
    "stop": {"rounds": 5},
}


class LoopFleet(Fleet):
    """Daemons with the task that has its own loop."""

    def daemon(self, index: int, size: int) -> Daemon:
        """Create a daemon without starting it."""
        return loop_daemon(self.workspace, self.server, index, size)


def loop_daemon(workspace: Workspace, server: Coordinator, index: int, size: int, **options: Any) -> Daemon:
    """A daemon that has not started."""
    shard = {"partition": {"method": "iid", "clients": size, "seed": 1}, "index": index}
    daemon = Daemon(workspace, server, f"edge-{index}", shard=shard)
    hold = {"hold": str(daemon.hold)}
    daemon.configure(task={"name": LOOP, "options": {**hold, **options}})
    return daemon


@pytest.fixture(scope="module")
def module_fleet(module_workspace: Workspace) -> LoopFleet:
    """One fleet for all tests of this module."""
    return LoopFleet(module_workspace, 3, tasks=[LOOP])


@pytest.fixture
def fleet(module_fleet: LoopFleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopFleet]:
    """A coordinator and three idle daemons."""
    monkeypatch.syspath_prepend(HERE)
    with module_fleet.lent() as fleet:
        yield fleet


def epochs_of(summary: admin_pb2.RoundSummary) -> list[dict[str, float]]:
    """The metrics of its local epochs as plain values."""
    return [dict(epoch.values) for epoch in summary.local_epochs]


@pytest.mark.slow
@pytest.mark.parametrize(
    "local",
    [pytest.param({}, id="epochs"), pytest.param({"epochs": None, "steps": 5}, id="steps", marks=pytest.mark.slow)],
)
def test_a_networked_run_is_the_simulated_run(fleet: LoopFleet, request: pytest.FixtureRequest, local: Any) -> None:
    """Models, training losses and the metrics of the local epochs are equal, and the loop is not plain SGD."""
    sections = {**SECTIONS, "local": {**SECTIONS["local"], **local}}
    name = f"loop-{request.node.callspec.id}"
    fleet.server.create(name, **sections)
    fleet.server.completed(name)
    expected, came = simulated_rounds(name, **sections), fleet.server.rounds(name)
    assert [(done.digest, done.training_loss) for done in expected] == [
        (done.model_digest, done.training_loss) for done in came
    ]
    assert [list(map(dict, done.local_epochs)) for done in expected] == [epochs_of(done) for done in came]
    assert [len(done.local_epochs) for done in came] == [sections["local"]["epochs"] or 1] * 5
    assert all(epoch.keys() == {"loss", "accuracy"} for epoch in epochs_of(came[0]))
    plain = {**sections, "task": {"name": "tiny_task:Tiny"}}
    assert simulated_rounds(name, **plain)[0].digest != expected[0].digest


@pytest.mark.slow
def test_killed_processes_change_no_bit(fleet: LoopFleet, tmp_path: Path) -> None:
    """One daemon has delivered and is killed with the coordinator. The models are those of simulation and replay."""
    quick, slow = fleet.half_delivered("killed", **SECTIONS)
    quick.kill()
    fleet.server.kill()
    fleet.server.serve()
    quick.start()
    slow.hold.unlink()
    expected = simulated_rounds("killed", **SECTIONS)
    assert fleet.server.digests("killed") == [done.digest for done in expected]
    assert [epochs_of(done) for done in fleet.server.rounds("killed")] == [
        list(map(dict, done.local_epochs)) for done in expected
    ]
    assert len(quick.events("trained", run="killed", round=0)) == 1
    config = tmp_path / "run.toml"
    config.write_text(
        f'[task]\nname = "{LOOP}"\n[simulation]\nclients = 3\nnames = "edge-{{index}}"\n'
        'partition = { method = "iid", seed = 1 }\n'
    )
    state = str(fleet.server.settings["state_dir"])
    result = CliRunner().invoke(app, ["simulate", str(config), "--replay", "killed", "--state-dir", state])
    assert result.exit_code == 0, result.output


def test_a_loop_ends_when_its_work_is_not_needed(fleet: LoopFleet) -> None:
    """The run is stopped while a daemon trains: its loop ends at its next step, and the daemon takes other work."""
    fleet.hold()
    fleet.server.create("stopped", **{**SECTIONS, "local": {"epochs": 1000}})
    cohort = fleet.server.until("stopped", lambda run: len(run.cohort) == 2, "it draws two").cohort
    for client in cohort:
        fleet[client].logged("assignment", run="stopped")
    with fleet.server.admin() as admin:
        admin.runs.stop_run("stopped", "not needed")
    fleet.release()
    fleet.server.create("next", **{**SECTIONS, "stop": {"rounds": 1}})
    fleet.server.completed("next")
    assert not any(fleet[client].events("trained", run="stopped") for client in cohort)


@pytest.mark.parametrize(
    ("algorithm", "inexact", "why"),
    [
        pytest.param({"name": "fedcm"}, False, "local.inexact = true", id="fedcm"),
        pytest.param({"name": "fedprox"}, False, "not plain steps along the gradient", id="fedprox"),
        pytest.param({"name": "fedsam"}, False, "not plain steps along the gradient", id="fedsam"),
        pytest.param({"name": "fednova"}, True, "the number that a loop reports cannot be checked", id="fednova"),
        pytest.param({"name": "mfl"}, True, "the momentum of their local steps", id="mfl"),
        pytest.param({"name": "fedrobust"}, True, "moves the map of the inputs", id="fedrobust"),
    ],
)
def test_methods_that_make_other_steps_are_refused(
    fleet: LoopFleet, algorithm: dict[str, Any], inexact: bool, why: str
) -> None:
    """The creation of the run is refused with the reason, and for a few methods also with local.inexact."""
    with pytest.raises(OpsError, match=r"algorithm\.name: expected a method of plain local steps") as refused:
        fleet.server.create("refused", task={"name": LOOP}, algorithm=algorithm, local={"inexact": inexact})
    assert why in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedcm", "scaffold", "mime"])
def test_other_methods_are_inexact_where_the_run_allows_it(fleet: LoopFleet, method: str) -> None:
    """Their sums and client states work with the loop's deltas, in the network as in the simulation."""
    sections = {
        **SECTIONS, "algorithm": {"name": method}, "population": 3, "local": {**SECTIONS["local"], "inexact": True}
    }  # fmt: skip
    fleet.server.create(f"inexact-{method}", **sections)
    assert fleet.server.digests(f"inexact-{method}") == [
        done.digest for done in simulated_rounds(f"inexact-{method}", **sections)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("returns", "why"),
    [
        pytest.param(
            "nothing",
            "expected the task's train() to return a TrainReport, got NoneType",
            id="nothing",
            marks=pytest.mark.slow,
        ),
        pytest.param("nan", "expected finite metrics of local epochs, got accuracy = nan in epoch 0", id="nan"),
    ],
)
def test_a_wrong_report_is_a_failure_of_the_client(fleet: LoopFleet, returns: str, why: str) -> None:
    """One daemon's loop returns a wrong report. It fails with the reason, and the round closes with the others."""
    wrong = fleet["edge-1"]
    wrong.terminate()
    loop_daemon(fleet.workspace, fleet.server, 1, 3, returns=returns)
    wrong.start()
    fleet.server.until_present("edge-1")
    name = f"wrong-{returns}"
    sections = {**SECTIONS, "round": {"clients_per_round": 3, "quorum": 2}, "stop": {"rounds": 1}}
    fleet.server.create(name, **sections)
    fleet.server.completed(name)
    failure = wrong.logged("work_failed", run=name, round=0)
    loop_daemon(fleet.workspace, fleet.server, 1, 3)  # its settings as before
    wrong.terminate()
    wrong.start()
    assert why in failure["message"]
    assert fleet.server.rounds(name)[0].accepted == 2
