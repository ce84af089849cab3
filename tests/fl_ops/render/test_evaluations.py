"""Clients' evaluations and the costs to a target: tables and JSON."""

from __future__ import annotations

import json

from google.protobuf.json_format import ParseDict

from fl_ops.render.rounds import rounds_table
from fl_web.facts.rounds import Round
from protos.fl.v1 import admin_pb2
from tests.fl_ops.conftest import FakeAdmin, Fl

SUMMARY = {
    "accuracy": 0.9, "clients_evaluated": 2, "clients_accuracy_mean": 0.6, "clients_accuracy_std": 0.2,
    "clients_accuracy_worst_decile": 0.4, "clients_accuracy_best_decile": 0.8, "clients_accuracy": 0.7,
}  # fmt: skip
ANSWER = admin_pb2.ListEvaluationsResponse(
    round=admin_pb2.RoundSummary(round=4, metrics=SUMMARY),
    evaluations=[
        admin_pb2.ClientEvaluation(client_id="good", num_examples=1234, metrics={"loss": 0.1, "accuracy": 0.8}),
        admin_pb2.ClientEvaluation(client_id="odd\x1b[2J", num_examples=1, metrics={"loss": 0.2}),
        admin_pb2.ClientEvaluation(client_id="bad", num_examples=10, metrics={"loss": 0.9, "accuracy": 0.4}),
    ],
)


def test_the_worst_client_stands_first(admin: FakeAdmin, fl: Fl) -> None:
    """Sorted by accuracy, clients without one last; below, the summary. The request has the round."""
    admin.responses["ListEvaluations"] = ANSWER
    text = fl("run", "evaluations", "digits-1", "--round", "4").stdout
    assert text.index("bad") < text.index("good") < text.index("odd")
    assert text.index("accuracy") < text.index("loss")
    assert "accuracy 60.00 ± 20.00 %, worst tenth 40.00 %, best tenth 80.00 %, over all examples 70.00 %" in text
    assert "1,234" in text
    assert "\x1b" not in text
    assert admin.requests == [admin_pb2.ListEvaluationsRequest(run_id="digits-1", round=4, page_size=1000)]


def test_the_highest_loss_is_the_worst(admin: FakeAdmin, fl: Fl) -> None:
    """Where there is no accuracy the first metric by name decides, in its own direction."""
    rows = [admin_pb2.ClientEvaluation(client_id=name, metrics={"loss": loss}) for name, loss in (("a", 1), ("b", 2))]
    admin.responses["ListEvaluations"] = admin_pb2.ListEvaluationsResponse(
        evaluations=rows, lower_is_better={"loss": True}
    )
    text = fl("run", "evaluations", "digits-1").stdout
    assert text.index("b ") < text.index("a ")
    assert "2 clients evaluated it so far, others are still expected" in text
    assert not admin.requests[0].HasField("round")


def test_an_evaluation_without_answers(admin: FakeAdmin, fl: Fl) -> None:
    """The text names the round."""
    admin.responses["ListEvaluations"] = admin_pb2.ListEvaluationsResponse(round=admin_pb2.RoundSummary(round=3))
    assert "no client has evaluated round 3" in fl("run", "evaluations", "digits-1").stdout


def test_evaluations_as_json_are_the_message(admin: FakeAdmin, fl: Fl) -> None:
    """Row for row, in the order of ids."""
    admin.responses["ListEvaluations"] = ANSWER
    read = json.loads(fl("run", "evaluations", "digits-1", "--json").stdout)
    assert ParseDict(read, admin_pb2.ListEvaluationsResponse()) == ANSWER


def run_with(target: float | None = None) -> admin_pb2.GetRunResponse:
    """Three rounds of 1 MiB down, 2 MiB up and 30 s, with accuracies 0.5, 0.8, 0.7."""
    run = admin_pb2.RunStatus(run_id="digits-1")
    run.spec.stop.metric = "accuracy"
    if target is not None:
        run.spec.stop.target = target
    rounds = [
        admin_pb2.RoundSummary(
            round=number, seconds=30, bytes_down=1 << 20, bytes_up=2 << 20, metrics={"accuracy": value}
        )
        for number, value in enumerate((0.5, 0.8, 0.7))
    ]
    return admin_pb2.GetRunResponse(run=run, rounds=rounds)


def test_the_costs_to_a_target(admin: FakeAdmin, fl: Fl) -> None:
    """0.8 in the second round: two rounds, 2 MiB down, 4 MiB up, a minute; 0.9 is not reached."""
    admin.responses["GetRun"] = run_with()
    text = fl("run", "show", "digits-1", "--target", "0.8").stdout
    assert "accuracy 0.8 after 2 rounds, 2.0 MiB down, 4.0 MiB up, 1 min 00 s" in text
    assert "accuracy 0.9 is not reached" in fl("run", "show", "digits-1", "--target", "0.9").stdout
    assert "target" not in fl("run", "show", "digits-1").stdout


def test_the_runs_own_target_is_shown_without_asking(admin: FakeAdmin, fl: Fl) -> None:
    """One that is given comes before it."""
    admin.responses["GetRun"] = run_with(target=0.5)
    assert "accuracy 0.5 after 1 round, " in fl("run", "show", "digits-1").stdout
    assert "accuracy 0.7 after 2 rounds, " in fl("run", "show", "digits-1", "--target", "0.7").stdout


def test_a_target_as_json(admin: FakeAdmin, fl: Fl) -> None:
    """Next to the run and its rounds; null if it is not reached."""
    admin.responses["GetRun"] = run_with()
    read = json.loads(fl("run", "show", "digits-1", "--target", "0.8", "--json").stdout)
    reached = {"round": 1, "bytes_down": 2 << 20, "bytes_up": 4 << 20, "seconds": 60.0}
    assert read["target"] == {"metric": "accuracy", "target": 0.8, "reached": reached}
    assert len(read["rounds"]) == 3
    read = json.loads(fl("run", "show", "digits-1", "--target", "0.9", "--json").stdout)
    assert read["target"]["reached"] is None


def test_rounds_show_existing_client_evaluations(admin: FakeAdmin, fl: Fl) -> None:
    """Mean and deviation, the worst and the best decile; without clients' numbers the columns are not there."""
    summary = admin_pb2.RoundSummary(metrics=SUMMARY)
    admin.responses["GetRun"] = admin_pb2.GetRunResponse(rounds=[summary, admin_pb2.RoundSummary(round=1)])
    text = fl("run", "show", "digits-1").stdout
    assert "60.00 ± 20.00 %" in text
    assert "40.00 %" in text
    assert "80.00 %" in text
    plain = rounds_table([Round.of(admin_pb2.RoundSummary(metrics={"accuracy": 0.9}))])
    assert "On clients" not in [column.removeprefix(">") for column in plain.columns]
