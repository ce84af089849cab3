"""The health of a run in `fl run show`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fl_ops.render.runs.criterion import shown_metric
from fl_ops.render.runs.health import health_rows, lowest_loss, norms, on_clients
from fl_ops.render.tables import best_of
from protos.fl.v1 import admin_pb2
from tests.fl_ops.conftest import FakeAdmin, Fl

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
        ("on clients", "accuracy 81.20 ± 3.10 %, worst tenth 70.00 %"),
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
    rows = dict(health_rows(a_run(newest_metrics={"accuracy": 0.961, "loss": 0.13, **CLIENTS})))
    assert rows[name] == expected


def test_the_last_commit_has_an_age_while_the_run_goes_on() -> None:
    """After its end the age is not shown."""
    run = a_run()
    assert dict(health_rows(run, now=1042.0))["last commit"].endswith(", 42.0 s ago")
    run.ended.seconds = 1001
    assert "ago" not in dict(health_rows(run, now=1042.0))["last commit"]


def test_missing_values_have_no_line() -> None:
    """A new run, or one of an older coordinator, has no such lines."""
    assert {expected for _, expected in health_rows(admin_pb2.RunStatus(run_id="r"))} == {""}


def test_without_a_direction_there_is_no_cosine() -> None:
    """FedAvg sends none. Without differences in length there is no range."""
    plain = admin_pb2.RoundAccount(norms={"update": 2, "update_smallest": 2, "update_largest": 2, "aggregate": 1})
    assert norms(plain) == "updates 2, step 1"


def test_the_spread_of_a_loss_is_no_percentage() -> None:
    """Several metrics are listed in one line."""
    loss = {name.replace("accuracy", "loss"): value for name, value in CLIENTS.items()}
    assert on_clients({**CLIENTS, **loss}).endswith("; loss 0.812 ± 0.031, worst tenth 0.7")


def test_the_lowest_loss_follows_the_best_accuracy() -> None:
    """Unless the run stops by the loss: then it is the best value."""
    run = a_run(best_metrics={"accuracy": 0.9, "loss": 0.25})
    run.spec.stop.metric = "accuracy"
    run.best.round, run.best.metrics["accuracy"] = 3, 0.9
    assert best_of(run) == "90.00 % in round 3, lowest held-out loss 0.25"
    run.spec.stop.metric = "loss"
    assert lowest_loss(run) == ""


def test_details_are_a_second_table(admin: FakeAdmin, fl: Fl) -> None:
    """One line for each round, with its own norms and drop-outs; --json always has them."""
    admin.responses["GetRun"] = admin_pb2.GetRunResponse(
        run=a_run(),
        rounds=[admin_pb2.RoundSummary(round=0, attempts=2, account=ACCOUNT), admin_pb2.RoundSummary(round=1)],
    )
    assert "Cosine" not in fl("run", "show", "r").stdout
    text = fl("run", "show", "r", "--details").stdout
    line = next(line for line in text.splitlines() if "0.31 (0.2 to 0.55)" in line and "cosine" not in line)
    assert " ".join(line.split()) == "0 2 0.31 (0.2 to 0.55) 0.21 0.9 0.73 3 2 1 3 1 min 22 s 18.0 s"
    (first, _) = json.loads(fl("run", "show", "r", "--json").stdout)["rounds"]
    assert first["account"]["assignments"] == {"admitted": 48, "failed": 2, "lost": 1, "refused": 3}


def test_both_models_are_shown_and_the_columns_are_of_the_latest() -> None:
    """The averaged model's accuracy is a percentage too; a task without accuracy has its own metric in the column."""
    rows = dict(health_rows(a_run(newest_metrics={"accuracy": 0.5, "averaged_accuracy": 0.61})))
    assert "averaged_accuracy 61" in next(text for text in rows.values() if "accuracy" in text)
    assert shown_metric(a_run(newest_metrics={"mae": 1.0, "averaged_mae": 0.9, "averaged_loss": 0.8})) == "mae"
