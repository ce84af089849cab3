"""Metrics with directions and sums in real processes: best round, target, export, and the same in a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_ops.errors import OpsError
from protos.fl.v1 import admin_pb2
from tests.marks import slow_except
from tests.processes.federation import Daemon, Fleet
from tests.processes.process import Workspace, eventually, run_fl
from tests.processes.simulated import simulated_rounds

SCORED = "tests.processes.scored_task:Scored"
SECTIONS: dict[str, Any] = {
    "task": {"name": SCORED, "options": {}},
    "evaluation": {"clients_every": 1},
    "local": {"epochs": 1, "learning_rate": 0.3},
}


class ScoredFleet(Fleet):
    """Daemons whose task has sums."""

    def daemon(self, index: int, size: int) -> Daemon:
        """Create a daemon without starting it."""
        shard = {"partition": {"method": "iid", "clients": size, "seed": 1}, "index": index}
        daemon = Daemon(self.workspace, self.server, f"edge-{index}", shard=shard)
        daemon.configure(task={"name": SCORED, "options": {}})
        return daemon


@pytest.fixture(scope="module")
def module_fleet(module_workspace: Workspace) -> ScoredFleet:
    """One fleet for all tests of this module."""
    return ScoredFleet(module_workspace, 3, tasks=[SCORED])


@pytest.fixture
def fleet(module_fleet: ScoredFleet) -> Iterator[ScoredFleet]:
    """A coordinator and three idle daemons."""
    with module_fleet.lent() as fleet:
        yield fleet


def values(fleet: Fleet, run: str, metric: str) -> list[float]:
    """A metric of all rounds. An evaluation of a round before the last one may end after the run."""

    def of_all() -> list[float] | None:
        rounds = fleet.server.rounds(run)
        return [done.metrics[metric] for done in rounds] if all(metric in done.metrics for done in rounds) else None

    return eventually(of_all, f"all rounds have {metric}")


@pytest.mark.parametrize(
    ("metric", "stop", "pick"),
    slow_except(
        [
            ("perplexity", {}, min),
            ("misses", {}, min),
            ("gloss", {"lower_is_better": False}, max),
            ("clients_perplexity", {}, min),
        ],
        ("clients_perplexity", {}, min),
    ),
)
def test_best_goes_by_the_direction(fleet: ScoredFleet, metric: str, stop: dict[str, Any], pick: Any) -> None:
    """By the table, by the task, by the run's file, and for a metric of the clients: best is the best value."""
    run = fleet.server.create(
        f"best-{metric.replace('_', '-')}", **SECTIONS, stop={"metric": metric, "rounds": 2, **stop}
    )
    fleet.server.completed(run)
    found, status = values(fleet, run, metric), fleet.server.completed(run)
    assert (status.best.metrics[metric], status.best.round) == (pick(found), found.index(pick(found)))
    assert status.best_metrics[metric] == pick(found)
    assert status.spec.stop.lower_is_better is (pick is min)


def test_a_target_is_reached_from_above(fleet: ScoredFleet) -> None:
    """A perplexity over the target ends nothing, and the run says when it is under it; a simulation ends there too."""
    first, second = (done.metrics["perplexity"] for done in simulated_rounds("target", **SECTIONS, stop={"rounds": 2}))
    stop = {"metric": "perplexity", "target": (first + second) / 2, "rounds": 4}
    status = fleet.server.completed(fleet.server.create("target", **SECTIONS, stop=stop))
    assert status.reason.startswith(f"perplexity reached {second:.6g}")
    assert (status.rounds_done, len(simulated_rounds("target", **SECTIONS, stop=stop))) == (2, 2)


def test_simulated_values_are_those_of_processes(fleet: ScoredFleet) -> None:
    """F1, recall of each class and perplexity over all clients, and every statistic, have the same bits."""
    run = fleet.server.create("same", **SECTIONS, stop={"rounds": 2})
    fleet.server.completed(run)
    rounds = fleet.server.rounds(run)
    assert {"f1_macro", "recalls/0", "clients_f1_macro", "clients_recalls/2", "clients_perplexity_worst_decile"} <= set(
        rounds[-1].metrics
    )
    simulated = simulated_rounds("same", **SECTIONS, stop={"rounds": 2})
    assert [done.metrics for done in simulated] == [dict(each.metrics) for each in rounds]


@pytest.mark.slow  # test_personal has a run whose clients evaluate the averaged model
def test_clients_evaluate_the_averaged_model(fleet: ScoredFleet) -> None:
    """Its values, over sums too, have the same bits in a simulation, from the round on in which there is one.

    A rule by one of them ends both. The committed models are those of a run without it.
    """
    evaluation = {"clients_every": 1, "averaged_on_clients": True}
    sections = {**SECTIONS, "evaluation": evaluation, "averaging": {"method": "tail", "start": 1}}
    stop = {"rounds": 4, "metric": "clients_averaged_perplexity", "target": 1e9}
    run = fleet.server.create("averaged", **sections, stop=stop)
    status = fleet.server.completed(run)
    assert status.reason.startswith("clients_averaged_perplexity reached")
    # The server's own evaluation goes on after an end by a metric of the clients.
    fleet.server.until(run, lambda status: "averaged_perplexity" in status.latest.metrics, "the server has evaluated")
    first, second = fleet.server.rounds(run)
    assert not [name for name in first.metrics if "averaged" in name]
    assert {"clients_averaged_f1_macro", "clients_averaged_recalls/2", "clients_averaged_loss_mean"} <= set(
        second.metrics
    )
    # The average of one model is that model.
    assert second.metrics["clients_averaged_f1_macro"] == second.metrics["clients_f1_macro"]
    simulated = simulated_rounds("averaged", **sections, stop=stop)
    assert [done.metrics for done in simulated] == [dict(each.metrics) for each in (first, second)]
    plain = simulated_rounds("averaged", **SECTIONS, stop={"rounds": 2})
    assert [done.digest for done in plain] == [each.model_digest for each in (first, second)]


@pytest.mark.parametrize(
    ("metric", "why"),
    [
        ("acuracy", r"a metric that the task reports \(accuracy, f1_macro, gloss, loss, misses, perplexity, recalls/0"),
        ("clients_acuracy", r"a metric that clients report \(clients_accuracy, clients_accuracy_best_decile"),
        (
            "gloss",
            r'a metric whose direction is known: set stop.lower_is_better .*Metric\("gloss", lower_is_better=True\)',
        ),
    ],
)
def test_a_metric_that_cannot_be_used_is_refused_at_creation(fleet: ScoredFleet, metric: str, why: str) -> None:
    """The message has the names that exist, or what to write."""
    with pytest.raises(OpsError, match=f"stop.metric: expected {why}"):
        fleet.server.create("refused", **SECTIONS, stop={"metric": metric})


def test_without_a_best_round_there_is_no_best_model(fleet: ScoredFleet, tmp_path: Path) -> None:
    """`fl export --round best` of a run without evaluations fails and writes nothing; the latest model is there."""
    sections = {**SECTIONS, "evaluation": {"every": 0}}
    run = fleet.server.create("no-best", **sections, stop={"rounds": 1})
    assert not fleet.server.completed(run).HasField("best")
    address = str(fleet.server.settings["admin_listen"])
    common = ("--insecure", "--server", address)
    refused = run_fl("export", run, "--round", "best", "--out", "best.safetensors", *common, folder=tmp_path)
    assert refused.returncode != 0
    assert "has no best round: no evaluation so far has a finite 'loss'" in refused.stderr
    assert not (tmp_path / "best.safetensors").exists()
    assert run_fl("export", run, "--out", "latest.safetensors", *common, folder=tmp_path).returncode == 0


def test_without_a_metric_best_is_the_lowest_loss(fleet: ScoredFleet) -> None:
    """The default of a run that names no metric."""
    run = fleet.server.create("by-loss", **SECTIONS)
    status: admin_pb2.RunStatus = fleet.server.completed(run)
    losses = values(fleet, run, "loss")
    assert (status.spec.stop.metric, status.best.round) == ("loss", losses.index(min(losses)))
