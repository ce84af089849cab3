"""The charts of a run."""

from __future__ import annotations

import json
import math

from fl_common.units import measured, metric_title
from fl_web.charts import breaks, chart_json, marks, present_charts
from protos.fl.v1 import admin_pb2 as pb
from tests.fl_web.rounds import committed

CREATED = 100.0


def run(every: int = 1, clients_every: int = 0) -> pb.RunStatus:
    """A run that evaluates each so many rounds."""
    status = pb.RunStatus()
    status.created.seconds = int(CREATED)
    status.spec.evaluation.every, status.spec.evaluation.clients_every = every, clients_every
    return status


def test_only_charts_with_values_are_present() -> None:
    """A run without momentum has no cosine; bytes are always there."""
    rounds = [committed(0, metrics={"accuracy": 0.5}), committed(1, training_loss=0.3)]
    assert [chart.key for chart in present_charts(rounds)] == ["accuracy", "loss", "bytes"]


def test_a_series_without_values_is_left_out() -> None:
    """No empty columns in the tables."""
    (chart, *_) = present_charts([committed(0, metrics={"accuracy": 0.5, "clients_accuracy_mean": 0.4})])
    assert [series.key for series in chart.series] == ["accuracy", "clients_accuracy_mean"]


def test_each_phase_that_took_time_is_a_series() -> None:
    """The rounds name the phases, so the page knows none of them."""
    rounds = [committed(0, phases={"stepping": 1.0}), committed(1, phases={"made up": 2.0, "stepping": 1.0})]
    chart = next(drawn for drawn in present_charts(rounds) if drawn.key == "phases")
    assert [series.key for series in chart.series] == ["made up", "stepping"]
    drawn = chart_json(chart, [*rounds, committed(2)], run())
    values = {series["key"]: series["values"] for series in drawn["series"]}
    assert values == {"made up": [0.0, 2.0], "stepping": [1.0, 1.0]}, "no line through rounds without the phase"


def test_the_averaged_model_is_a_series_beside_the_latest_one() -> None:
    """In the chart of the same metric, with a title in words; it has no chart of its own."""
    metrics = {"accuracy": 0.5, "averaged_accuracy": 0.6, "loss": 1.0, "averaged_loss": 0.9}
    present = present_charts([committed(0, metrics=metrics)])
    charts = {chart.key: [series.key for series in chart.series] for chart in present}
    assert charts == {
        "accuracy": ["accuracy", "averaged_accuracy"], "loss": ["loss", "averaged_loss"], "bytes": ["down", "up"],
    }  # fmt: skip
    assert metric_title("averaged_top5_accuracy") == "top5 accuracy of the averaged model"
    assert metric_title("clients_averaged_loss_mean") == "loss of the averaged model on clients, mean"
    assert measured(0.6, "averaged_accuracy") == measured(0.6, "accuracy")


def test_a_point_has_its_place_on_every_axis() -> None:
    """Rounds count from 1 on the axis; bytes are down and up together; time is since the creation."""
    rounds = [committed(3, metrics={"accuracy": 0.5})]
    (chart, *_) = present_charts(rounds)
    assert chart_json(chart, rounds, run())["x"] == [{"rounds": 4, "bytes": 60, "time": 4.0}]


def test_values_that_json_lacks_are_null() -> None:
    """A diverged loss is a gap in the curve."""
    rounds = [committed(0, metrics={"loss": math.nan}), committed(1, metrics={"loss": 2.0})]
    chart = next(drawn for drawn in present_charts(rounds) if drawn.key == "loss")
    text = json.dumps(chart_json(chart, rounds, run()), allow_nan=False)
    assert json.loads(text)["series"][0]["values"] == [None, 2.0]


def test_a_missing_value_interrupts_its_curve_alone() -> None:
    """The evaluation of round 2 is lost, and the clients evaluate each second round: no line leads over round 2."""
    metrics = [{"accuracy": 0.5, "clients_accuracy_mean": 0.4}, {"accuracy": 0.6}, {"clients_accuracy_mean": 0.5},
               {"accuracy": 0.7}, {"accuracy": 0.8, "clients_accuracy_mean": 0.6}]  # fmt: skip
    rounds = [committed(number, metrics=values) for number, values in enumerate(metrics)]
    (chart, *_) = present_charts(rounds)
    drawn = chart_json(chart, rounds, run(clients_every=2))
    assert {series["key"]: series["breaks"] for series in drawn["series"]} == {
        "accuracy": [2], "clients_accuracy_mean": [],
    }  # fmt: skip
    newest = chart_json(chart, rounds, run(clients_every=2), rounds[-1:])
    assert [point["rounds"] for point in newest["x"]] == [5], "an open page gets what is new"
    assert newest["series"][0]["breaks"] == [2], "and keeps the gaps before"


def test_a_value_that_is_not_finite_interrupts_its_curve() -> None:
    """A line from the last finite value to the next one would hide it."""
    assert breaks([(0, 1.0), (1, math.inf), (2, 2.0), (3, 3.0), (9, 4.0)], every=1) == [1, 4]
    assert breaks([(0, math.nan), (1, 1.0), (5, 2.0)], every=4) == []


def test_a_long_curve_has_at_most_2000_points() -> None:
    """The first and the last round are among them."""
    rounds = [committed(number, metrics={"accuracy": (number % 97) / 97}) for number in range(9000)]
    (chart, *_) = present_charts(rounds)
    xs = chart_json(chart, rounds, run())["x"]
    assert (len(xs), xs[0]["rounds"], xs[-1]["rounds"]) == (2000, 1, 9000)


def test_refusals_and_restarts_are_marked() -> None:
    """A refusal at its round; a restart at its time, and at the next committed round on the other axes."""
    rounds = [committed(0), committed(1, refused={"norm": 2, "not_finite": 1}, attempts=3), committed(2)]
    event = {"time": 101.5, "kind": "restart", "text": "run recovered"}
    found = marks(rounds, CREATED, [event])
    assert [(mark["kind"], mark["rounds"], mark["time"]) for mark in found] == [
        ("refused", 2, 2.0),
        ("attempts", 2, 2.0),
        ("restart", 2, 1.5),
    ]
    assert found[0]["text"] == "round 1: refused 2 norm, 1 not finite"


def test_the_spread_has_an_axis_of_its_own() -> None:
    """No curve of the accuracy's chart is a deviation; the two charts that show progress come first."""
    metrics = {"accuracy": 0.9, "loss": 0.3, "clients_accuracy_mean": 0.8, "clients_accuracy_std": 0.1}
    charts = {
        chart.key: [line.key for line in chart.series] for chart in present_charts([committed(0, metrics=metrics)])
    }
    assert list(charts)[:3] == ["accuracy", "loss", "accuracy_spread"]
    assert charts["accuracy_spread"] == ["clients_accuracy_std"]
    assert "clients_accuracy_std" not in charts["accuracy"]
