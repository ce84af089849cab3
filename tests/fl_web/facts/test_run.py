"""What is told of a run: its figures, its best round, and the time that it still needs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from fl_web.facts import run as run_facts
from fl_web.facts.rounds import norms, on_clients, shown_metric
from fl_web.facts.run import best, figures, time_left
from protos.fl.v1 import admin_pb2
from tests.fl_web.rounds import committed

CLIENTS = {
    "clients_evaluated": 9.0, "clients_accuracy": 0.8, "clients_accuracy_mean": 0.812, "clients_accuracy_std": 0.031,
    "clients_accuracy_worst_decile": 0.7,
}  # fmt: skip
ACCOUNT = admin_pb2.RoundAccount(
    norms={"update": 0.31, "update_smallest": 0.2, "update_largest": 0.55, "aggregate": 0.21, "direction": 0.9},
    cosine=0.73,
    assignments={"admitted": 48, "failed": 2, "lost": 1, "refused": 3},
    refused={"not_finite": 2, "norm": 1},
    staleness={0: 48, 1: 2, 17: 1},
    seconds={"collecting": 82.0, "stepping": 17.9, "selecting": 0.1},
    quorum_missed=1,
)


def a_run(**changes: Any) -> admin_pb2.RunStatus:
    """A run with its latest commit at second 1,000."""
    run = admin_pb2.RunStatus(run_id="r", account=ACCOUNT, **changes)
    run.latest.round = 7
    run.latest.committed.seconds = 1000
    run.latest.account.CopyFrom(ACCOUNT)
    return run


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("evaluation", "accuracy 96.10 %, held-out loss 0.13"),
        ("on clients", "accuracy 81.20 ± 3.10 %, worst tenth 70.00 %, over all examples 80.00 %"),
        ("norms", "updates 0.31 (0.2 to 0.55), step 0.21, direction 0.9, cosine 0.73"),
        ("assignments", "48 admitted, 3 refused, 2 failed, 1 lost"),
        ("refused", "1 norm, 2 not finite"),
        ("quorum missed", "1 time"),
        ("late updates", "2 by 1 round, 1 by more than 16 rounds"),
        ("time", "82 % collecting, 18 % stepping"),
    ],
)
def test_each_value_is_a_line(name: str, expected: str) -> None:
    """Each value has its line; phases that took no time are left out."""
    rows = dict(figures(a_run(newest_metrics={"accuracy": 0.961, "loss": 0.13, **CLIENTS})))
    assert rows[name] == (expected,)


def test_what_devices_state_of_their_records_is_a_line() -> None:
    """Number, median and largest, without a name."""
    stated = admin_pb2.StatedPrivacy(clients=12, median=1.25, largest=3.5, delta=1e-6)
    (text,) = dict(figures(a_run(stated_privacy=stated)))["privacy"]
    assert text == (
        "12 of the run's devices state what their data has spent over all runs: epsilon 1.25 (median), 3.5 (largest, at"
        " delta 1e-06), by Renyi divergences"
    )


def test_missing_values_have_no_line() -> None:
    """A new run has no figures."""
    assert not any(row.known for row in figures(admin_pb2.RunStatus(run_id="r")))


def test_without_a_direction_there_is_no_cosine() -> None:
    """FedAvg sends none. Without differences in length there is no range."""
    plain = admin_pb2.RoundAccount(norms={"update": 2, "update_smallest": 2, "update_largest": 2, "aggregate": 1})
    assert norms(plain.norms, None) == "updates 2, step 1"
    assert norms({"aggregate": 1}, None) == "step 1", "secure aggregation hides the updates"


def test_the_spread_of_a_loss_is_no_percentage() -> None:
    """Each metric has its own text."""
    loss = {name.replace("accuracy", "loss"): value for name, value in CLIENTS.items()}
    assert on_clients({**CLIENTS, **loss})[1] == "loss 0.812 ± 0.031, worst tenth 0.7, over all examples 0.8"


def test_the_lowest_loss_follows_the_best_accuracy() -> None:
    """Unless the run stops by the loss: then it is the best value."""
    run = a_run(best_metrics={"accuracy": 0.9, "loss": 0.25})
    run.spec.stop.metric = "accuracy"
    run.best.round, run.best.metrics["accuracy"] = 3, 0.9
    assert best(run) == "90.00 % in round 3, lowest held-out loss 0.25"
    run.spec.stop.metric = "loss"
    assert "lowest" not in best(run)


def test_both_models_are_shown_and_the_columns_are_of_the_latest() -> None:
    """The averaged model's accuracy is a percentage too; a task without accuracy has its own metric in the column."""
    rows = dict(figures(a_run(newest_metrics={"accuracy": 0.5, "averaged_accuracy": 0.61})))
    assert rows["evaluation"] == ("accuracy 50.00 %, accuracy of the averaged model 61.00 %",)
    assert shown_metric(a_run(newest_metrics={"mae": 1.0, "averaged_mae": 0.9, "averaged_loss": 0.8})) == "mae"


@pytest.mark.parametrize(
    ("planned", "commits", "expected"),
    [
        pytest.param(3, [], "", id="no round"),
        pytest.param(0, [1020.0], "", id="unknown end"),
        pytest.param(3, [1020.0], "40.0 s", id="one round"),
        pytest.param(4, [1100.0, 1110.0], "20.0 s", id="newest pace"),
        pytest.param(62, [1010.0, 1030.0], "20 min", id="minutes"),
        pytest.param(2, [1010.0, 1030.0], "", id="all done"),
    ],
)
def test_the_pace_is_that_of_the_newest_rounds(planned: int, commits: list[float], expected: str) -> None:
    """The first round's is taken from the creation of the run; a long estimate is in whole minutes."""
    run = admin_pb2.RunStatus(run_id="r", rounds_done=len(commits), created=Timestamp(seconds=1000))
    run.spec.stop.rounds = planned
    if commits:
        run.latest.committed.seconds = int(commits[-1])
    rounds = [committed(number, committed=at) for number, at in enumerate(commits)]
    assert time_left(run, rounds) == expected


def test_a_list_of_runs_estimates_by_the_mean_pace() -> None:
    """It knows no rounds. A run that hangs keeps its estimate, and one that has ended has none."""
    run = admin_pb2.RunOverview(run_id="r", rounds_done=10, rounds_planned=40)
    run.created.seconds, run.latest_commit.seconds = 1000, 1100
    assert time_left(run) == "5 min"
    run.ended.seconds = 1200
    assert time_left(run) == ""


@pytest.mark.parametrize(
    ("values", "metric", "expected"),
    [
        pytest.param([0.5, 0.5, 0.6, 0.6], "accuracy", "up 10.00 points over 4 rounds", id="up"),
        pytest.param([2.0, 2.0, 1.0, 1.0], "loss", "down 1 over 4 rounds", id="down"),
        pytest.param([0.9, 0.9, 0.9, 0.9001], "accuracy", "flat over 4 rounds", id="flat"),
        pytest.param([0.1, 0.2, math.nan, 0.3], "accuracy", "", id="too-few"),
    ],
)
def test_a_trend_compares_the_halves_of_the_newest_values(values: list[float], metric: str, expected: str) -> None:
    """In points for a share, in the metric's own numbers else."""
    assert run_facts.trend(list(enumerate(values)), metric) == expected
