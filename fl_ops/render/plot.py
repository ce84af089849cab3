"""Draws runs as PNG: the metric of each, accuracy, losses, and the clients that do worst."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, BinaryIO, Literal

from fl_ops.render.figures import COLOURS, INK, marker_for, new_figure, plain_axes
from fl_web.facts.run import shown_epsilon
from protos.fl.v1 import admin_pb2

Axis = Literal["rounds", "bytes", "time"]
Rounds = Sequence[admin_pb2.RoundSummary]

_LABELS: dict[Axis, str] = {
    "rounds": "Rounds done",
    "bytes": "Megabytes down and up, all clients",
    "time": "Minutes of rounds",
}
_MEGABYTE, _MINUTE = 1e6, 60.0


@dataclass(frozen=True)
class _Line:
    """A value of rounds as a line. metric: its name in the metrics of a round; empty: the training loss."""

    metric: str
    label: str = ""
    style: Any = "-"
    deviation: str = ""
    """A metric whose value is drawn as a band around the line."""


@dataclass(frozen=True)
class _Panel:
    title: str
    lines: Sequence[_Line]
    factor: float = 1.0


_PANELS = (
    _Panel(
        "Accuracy, %",
        (
            _Line("accuracy", "held out"),
            _Line("clients_accuracy_mean", "mean over clients ± deviation", (0, (3, 2)), "clients_accuracy_std"),
        ),
        100,
    ),
    _Panel("Loss", (_Line("loss", "held out"), _Line("", "training", (0, (3, 2))))),
    _Panel("Accuracy on the worst tenth of the clients, %", (_Line("clients_accuracy_worst_decile"),), 100),
)


def draw(runs: Mapping[str, admin_pb2.GetRunResponse], axis: Axis, file: BinaryIO) -> bool:
    """Write the picture of runs, by id, with their rounds. Returns False, and writes nothing, if nothing is known.

    The legend has what private runs have spent.
    """
    rounds = {", ".join(filter(None, (name, shown_epsilon(run.run)))): run.rounds for name, run in runs.items()}
    own = _own_panels(dict.fromkeys(run.run.spec.stop.metric for run in runs.values()))
    panels = [panel for panel in (*own, *_PANELS) if _known(panel.lines, rounds)]
    if not panels:
        return False
    figure = new_figure(figsize=(4.2 * len(panels) + 0.6, 3.8), dpi=110)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False).flatten(), panels, strict=True):
        _panel(axes, panel, rounds, axis)
    figure.supxlabel(_LABELS[axis], color=INK, fontsize=10)
    figure.savefig(file, format="png")
    return True


def _own_panels(metrics: Iterable[str]) -> list[_Panel]:
    """A panel for each metric that a run chooses its best round by, unless the others show it."""
    shown = {line.metric for panel in _PANELS for line in panel.lines}
    return [_own_panel(metric) for metric in metrics if metric and metric not in shown]


def _own_panel(metric: str) -> _Panel:
    if metric.startswith("clients_"):
        return _Panel(metric, (_Line(metric),))
    mean = _Line(f"clients_{metric}_mean", "mean over clients ± deviation", (0, (3, 2)), f"clients_{metric}_std")
    return _Panel(metric, (_Line(metric, "held out"), _Line(f"clients_{metric}", "all clients", (0, (1, 1))), mean))


def _panel(axes: Any, panel: _Panel, runs: Mapping[str, Rounds], axis: Axis) -> None:
    labels: dict[str, Any] = {}
    marker = marker_for(max(map(len, runs.values())))
    for number, (name, rounds) in enumerate(runs.items()):
        colour, at = COLOURS[number % len(COLOURS)], _positions(rounds, axis)
        for line in panel.lines:
            points = _points(rounds, line)
            xs, ys = [at[index] for index in points], [panel.factor * value for value in points.values()]
            (drawn,) = axes.plot(xs, ys, color=colour, linestyle=line.style, linewidth=1.5, marker=marker, markersize=3)
            if points and line is panel.lines[0]:
                labels[name] = drawn
            _band(axes, (xs, ys, colour), [panel.factor * _value(rounds[index], line.deviation) for index in points])
    axes.set_title(panel.title, loc="left", color=INK, fontsize=10)
    named = _known([line for line in panel.lines if line.label], runs)
    styles = [axes.plot([], [], color=INK, linestyle=line.style, label=line.label)[0] for line in named]
    handles = [*labels.values(), *(styles if len(styles) > 1 else [])]
    texts = [*labels, *(line.label for line in named if len(styles) > 1)]
    axes.legend(handles, texts, fontsize=8, frameon=False)
    plain_axes(axes)
    axes.locator_params(axis="x", integer=axis == "rounds")


def _known(lines: Sequence[_Line], runs: Mapping[str, Rounds]) -> list[_Line]:
    """The lines that some run has."""
    return [line for line in lines if any(_points(rounds, line) for rounds in runs.values())]


def _band(axes: Any, line: tuple[Sequence[float], Sequence[float], str], deviations: Sequence[float]) -> None:
    xs, ys, colour = line
    if any(deviations):
        low = [value - deviation for value, deviation in zip(ys, deviations, strict=True)]
        high = [value + deviation for value, deviation in zip(ys, deviations, strict=True)]
        axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)


def _points(rounds: Rounds, line: _Line) -> dict[int, float]:
    """The known values of a line by the index of the round."""
    if not line.metric:
        return {index: row.training_loss for index, row in enumerate(rounds) if row.HasField("training_loss")}
    return {index: row.metrics[line.metric] for index, row in enumerate(rounds) if line.metric in row.metrics}


def _value(summary: admin_pb2.RoundSummary, metric: str) -> float:
    return summary.metrics.get(metric, 0.0)


def _positions(rounds: Rounds, axis: Axis) -> list[float]:
    """The position of each round on the axis."""
    if axis == "rounds":
        return [row.round + 1.0 for row in rounds]
    if axis == "bytes":
        return [total / _MEGABYTE for total in accumulate(row.bytes_down + row.bytes_up for row in rounds)]
    return [total / _MINUTE for total in accumulate(row.seconds for row in rounds)]
