"""Evaluation on clients over loopback: real daemons, killed ones, and a killed coordinator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes.federation import Coordinator, Daemon, Fleet
from tests.processes.process import Workspace, eventually, run_fl

KEPT = 16


class EvaluatingFleet(Fleet):
    """Daemons that keep a part of their shard for evaluation and can be held during an evaluation."""

    def daemon(self, index: int, size: int) -> Daemon:
        """Create a daemon without starting it."""
        shard = {"partition": {"method": "iid", "clients": size, "seed": 1}, "index": index}
        options = {"kept": KEPT, "hold_evaluation": str(self.ruler(index))}
        return Daemon(self.workspace, self.server, f"edge-{index}", shard=shard, options=options)

    def ruler(self, index: int) -> Path:
        """While this file exists, the daemon's evaluation waits."""
        return self.workspace.folder / f"edge-{index}.ruler"


@pytest.fixture
def fleet(workspace: Workspace) -> EvaluatingFleet:
    """A coordinator and three daemons that can evaluate; a lost one is given up after 0.5 s."""
    return EvaluatingFleet(workspace, 3, limits={"reattach_grace_s": 2.0})


def asking(server: Coordinator, name: str, every: int = 1, **sections: object) -> str:
    """Sections of a run that evaluates on all clients every this many rounds."""
    return server.create(name, evaluation={"clients_every": every}, **sections)


def test_evaluations_of_all_clients_are_stored_and_averaged(fleet: EvaluatingFleet, tmp_path: Path) -> None:
    """Two of three daemons train in a round. All three evaluate every second model, as `fl run evaluations` shows.

    No round waits for the answers of another, and at most two models are evaluated at a time.
    """
    run = asking(fleet.server, "asked", every=2, stop={"rounds": 4})
    fleet.server.completed(run)
    assert ["clients_evaluated" in summary.metrics for summary in fleet.server.rounds(run)] == [False, True] * 2
    for summary in fleet.server.rounds(run)[1::2]:
        assert summary.metrics["clients_evaluated"] == 3
        assert 0 <= summary.metrics["clients_accuracy_worst_decile"] <= summary.metrics["clients_accuracy_mean"] <= 1
        assert "accuracy" in summary.metrics
    address = str(fleet.server.settings["admin_listen"])
    result = run_fl("run", "evaluations", run, "--json", "--insecure", "--server", address, folder=tmp_path)
    answer = json.loads(result.stdout)
    assert answer["round"]["round"] == 3
    assert [(row["client_id"], row["num_examples"]) for row in answer["evaluations"]] == [
        (f"edge-{index}", str(KEPT)) for index in range(3)
    ]
    accuracies = [row["metrics"]["accuracy"] for row in answer["evaluations"]]
    assert answer["round"]["metrics"]["clients_accuracy_mean"] == pytest.approx(sum(accuracies) / 3)


@pytest.mark.slow
def test_an_evaluation_does_not_wait_for_a_killed_daemon(fleet: EvaluatingFleet) -> None:
    """After SIGKILL during its evaluation the others' numbers are stored before the deadline, and the run completes."""
    fleet.ruler(1).touch()
    run = asking(fleet.server, "killed-daemon", stop={"rounds": 1})
    eventually(lambda: evaluations(fleet.server, run) == ["edge-0", "edge-2"], "the others have answered")
    fleet["edge-1"].kill()
    fleet.server.completed(run)
    assert fleet.server.rounds(run)[0].metrics["clients_evaluated"] == 2


@pytest.mark.slow
def test_a_coordinator_killed_between_the_commit_and_the_answers(workspace: Workspace) -> None:
    """After SIGKILL with one of three answers, the restarted coordinator asks only the other two."""
    fleet = EvaluatingFleet(workspace, 3)
    for index in (1, 2):
        fleet.ruler(index).touch()
    run = asking(fleet.server, "killed-server", stop={"rounds": 1})
    eventually(lambda: evaluations(fleet.server, run) == ["edge-0"], "one has answered")
    fleet.server.kill()
    fleet.server.serve()
    for index in (1, 2):
        fleet.ruler(index).unlink()
    fleet.server.completed(run)
    metrics = fleet.server.rounds(run)[0].metrics
    assert metrics["clients_evaluated"] == 3
    assert "accuracy" in metrics
    assert evaluations(fleet.server, run) == ["edge-0", "edge-1", "edge-2"]
    assert len(fleet["edge-0"].events("evaluated", run=run)) == 1


def evaluations(server: Coordinator, run: str) -> list[str]:
    """Clients with an evaluation of the run's newest model; none before the first commit."""
    if not server.rounds(run):
        return []
    with server.admin() as admin:
        return [row.client_id for row in admin.runs.list_evaluations(run, 0).evaluations]
