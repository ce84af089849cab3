"""Charts of runs: their series, units and values over rounds, bytes or time, with few points that show the same curve.

A chart has the same numbers as the table beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fl_common.units import ACCURACY, counted
from fl_web.facts.rounds import Round, is_of_clients, seconds_of
from fl_web.facts.words import counts
from protos.fl.v1 import admin_pb2 as pb

MOST_POINTS = 2000
"""The most points of a curve in a chart: more than a screen has columns."""


def thinned(xs: Sequence[float], ys: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Indices of the points to keep, in order. The first and the last are kept.

    The points between are divided into buckets. Each bucket gives the point that makes the largest triangle with the
    point chosen before it and the mean of the next bucket.

    Args:
        xs: rising.
        ys: as many; a value that is not finite counts as 0 in the triangles.
        most: at least 3.
    """
    if most < 3:
        raise ValueError(f"expected at least 3 points to keep, got {most}")
    count = len(xs)
    if count <= most:
        return list(range(count))
    values = [y if math.isfinite(y) else 0.0 for y in ys]
    # Bounds of the buckets: the first and the last point are buckets of their own.
    bounds = [1 + (count - 2) * bucket // (most - 2) for bucket in range(most - 1)]
    kept = [0]
    for bucket in range(most - 2):
        begin, end = bounds[bucket], bounds[bucket + 1]
        after = range(end, bounds[bucket + 2]) if bucket + 2 < len(bounds) else range(count - 1, count)
        mean_x = sum(xs[i] for i in after) / len(after)
        mean_y = sum(values[i] for i in after) / len(after)
        kept.append(_largest(xs, values, kept[-1], range(begin, end), (mean_x, mean_y)))
    return [*kept, count - 1]


def _largest(  # noqa: PLR0913, PLR0917 - a point, its curve, and what it is compared with
    xs: Sequence[float], ys: Sequence[float], last: int, bucket: range, mean: tuple[float, float]
) -> int:
    """The point of a bucket that makes the largest triangle."""
    x0, y0 = xs[last], ys[last]
    dx, dy = mean[0] - x0, mean[1] - y0
    return max(bucket, key=lambda i: abs(dx * (ys[i] - y0) - (xs[i] - x0) * dy))


Unit = Literal["share", "number", "bytes", "seconds"]
Axis = Literal["rounds", "bytes", "time"]
AXES: tuple[Axis, ...] = ("rounds", "bytes", "time")


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of a chart."""

    key: str
    title: str
    field: str
    """The field of a round that has its values."""
    name: str | None = None
    """The name in that field, where it is a mapping."""
    other: float | None = None
    """The value of a round that has others in that field, and not this one."""

    def value(self, of: Round) -> float | None:
        """Its value in a round; None where there is none."""
        values = getattr(of, self.field)
        number: float | None = values if self.name is None else values.get(self.name, self.other if values else None)
        return number

    def breaks(self, rounds: Sequence[Round], run: pb.RunStatus) -> list[int]:
        """Where its curve is interrupted, as `breaks` of all committed rounds of the run."""
        every = evaluated_every(run, self.name or "") if self.field == "metrics" else 1
        return breaks(((row.round, self.value(row)) for row in rounds), every)


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of a run."""

    key: str
    title: str
    unit: Unit
    about: str
    """What it shows, for the hover text."""
    series: Sequence[Series]

    def rounds(self, rounds: Sequence[Round], most: int = MOST_POINTS) -> list[Round]:
        """The rounds with a value, thinned by the first series that has one."""
        with_value = [row for row in rounds if any(series.value(row) is not None for series in self.series)]
        lead = [next(value for line in self.series if (value := line.value(row)) is not None) for row in with_value]
        kept = thinned([float(row.round) for row in with_value], lead, most)
        return [with_value[index] for index in kept]


def _charts_of(rounds: Sequence[Round]) -> list[Chart]:
    """The charts of a run: first the two that show whether the model gets better.

    The names of its metrics decide the charts of evaluations.
    """
    own = [name for name in metric_names(rounds) if not name.startswith(("clients_", "averaged_")) and name != "loss"]
    own.sort(key=lambda name: (name != ACCURACY, name))
    first, *others = own or [ACCURACY]
    return [
        _evaluation(first),
        _LOSS,
        *map(_evaluation, others),
        *map(_spread, own),
        Chart("norms", "Norms", "number", "L2 norms: the accepted updates (mean, smallest, largest), the model's change"
              " and the direction sent", [
            Series("update", "updates, mean", "norms", "update"),
            Series("update_smallest", "smallest", "norms", "update_smallest"),
            Series("update_largest", "largest", "norms", "update_largest"),
            Series("aggregate", "step", "norms", "aggregate"),
            Series("direction", "direction", "norms", "direction"),
        ]),
        Chart("cosine", "Cosine", "number", "Cosine between the model's change and minus the direction sent", [
            Series("cosine", "step and direction", "cosine"),
        ]),
        Chart("phases", "Time by phase", "seconds", "Seconds of each round by phase", [
            Series(name, name, "phases", name, 0.0) for name in sorted({name for row in rounds for name in row.phases})
        ]),
        Chart("bytes", "Bytes", "bytes", "Tensor bytes of each round", [
            Series("down", "down", "down"),
            Series("up", "up", "up"),
        ]),
    ]  # fmt: skip


def _evaluation(name: str) -> Chart:
    title = name.replace("_", " ").capitalize()
    unit: Unit = "share" if name == ACCURACY else "number"
    about = f"{title} on held-out data of the server, and its mean and worst tenth over the clients' own data"
    return Chart(name, title, unit, about, [
        Series(name, "held-out", "metrics", name),
        Series(f"averaged_{name}", "averaged model", "metrics", f"averaged_{name}"),
        Series(f"clients_{name}_mean", "on clients, mean", "metrics", f"clients_{name}_mean"),
        Series(f"clients_{name}_worst_decile", "worst tenth", "metrics", f"clients_{name}_worst_decile"),
        Series(f"clients_averaged_{name}_mean", "averaged model on clients, mean",
               "metrics", f"clients_averaged_{name}_mean"),
    ])  # fmt: skip


_LOSS = Chart("loss", "Loss", "number", "Mean loss: on held-out data, and of the clients' local steps", [
    Series("loss", "held-out", "metrics", "loss"),
    Series("averaged_loss", "averaged model", "metrics", "averaged_loss"),
    Series("training_loss", "training", "training_loss"),
    Series("clients_loss_mean", "on clients, mean", "metrics", "clients_loss_mean"),
])  # fmt: skip


def _spread(name: str) -> Chart:
    """The spread over clients has an axis of its own: beside the values it looks like one of them."""
    title = f"{name.replace('_', ' ').capitalize()}: spread over clients"
    unit: Unit = "share" if name == ACCURACY else "number"
    return Chart(f"{name}_spread", title, unit, "Standard deviation over the clients' own data", [
        Series(f"clients_{name}_std", "spread", "metrics", f"clients_{name}_std"),
    ])  # fmt: skip


def metric_names(rounds: Sequence[Round]) -> list[str]:
    """Names of all metrics of the rounds."""
    return sorted({name for row in rounds for name in row.metrics})


def present_charts(rounds: Sequence[Round]) -> list[Chart]:
    """The charts with at least one value, each with the series that have one."""
    charts = []
    for chart in _charts_of(rounds):
        series = [line for line in chart.series if any(line.value(of) is not None for of in rounds)]
        if series:
            charts.append(Chart(chart.key, chart.title, chart.unit, chart.about, series))
    return charts


def position(of: Round, created: float) -> dict[str, float]:
    """Where a round lies on each axis: its number from 1, bytes down and up so far, seconds since the creation."""
    return {
        "rounds": of.round + 1,
        "bytes": of.total_down + of.total_up,
        "time": round(max(0.0, of.committed - created), 3),
    }


def evaluated_every(run: pb.RunStatus, metric: str) -> int:
    """How many rounds lie between two values of a metric."""
    evaluation = run.spec.evaluation
    return (evaluation.clients_every if is_of_clients(metric) else evaluation.every) or 1


def breaks(values: Iterable[tuple[int, float | None]], every: int) -> list[int]:
    """Where a curve is interrupted: positions on the axis of rounds after which no line leads to the next point.

    Between them a value is not finite, or is missing: the two lie more than `every` rounds apart.
    """
    places: list[int] = []
    last, lost = None, False
    for number, value in values:
        if value is None:
            continue
        if not math.isfinite(value):
            lost = True
            continue
        if last is not None and (lost or number - last > every):
            places.append(last + 1)
        last, lost = number, False
    return places


def chart_json(
    chart: Chart, rounds: Sequence[Round], run: pb.RunStatus, shown: Sequence[Round] | None = None
) -> dict[str, Any]:
    """A chart for the browser: values by series, null where a round has none, and where the curve is interrupted.

    rounds: all that are committed. shown: those that the browser gets; None for all.
    """
    kept, created = chart.rounds(rounds if shown is None else shown), seconds_of(run.created)
    return {
        "key": chart.key,
        "unit": chart.unit,
        "x": [position(row, created) for row in kept],
        "series": [
            {
                "key": series.key,
                "title": series.title,
                "values": [finite(series.value(of)) for of in kept],
                "breaks": series.breaks(rounds, run),
            }
            for series in chart.series
        ],
    }


def finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None


def marks(rounds: Sequence[Round], created: float, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is marked on the time axis: rounds with refused updates or repeated attempts, and restarts.

    events: of the history, with `time` (Unix seconds), `kind` and `text`. On the axes of rounds and bytes an event lies
    at the first round that was committed after it.
    """
    marked = []
    for row in rounds:
        if row.refused:
            text = f"round {row.round}: refused {counts(row.refused)}"
            marked.append({**position(row, created), "kind": "refused", "text": text})
        if row.attempts > 1:
            text = f"round {row.round}: {counted(row.attempts, 'attempt')}"
            marked.append({**position(row, created), "kind": "attempts", "text": text})
    for event in events:
        after = next((row for row in rounds if row.committed >= event["time"]), rounds[-1] if rounds else None)
        at = position(after, created) if after else {"rounds": 0, "bytes": 0}
        time = round(max(0.0, event["time"] - created), 3)
        marked.append({**at, "time": time, "kind": event["kind"], "text": event["text"]})
    return marked
