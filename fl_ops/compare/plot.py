"""Plots accuracy by round and by megabytes: a panel for each method, with all others in grey."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from fl_ops.compare.cells import ACCURACY, CellResult, in_percent
from fl_ops.compare.plan import ExperimentPlan, Plan
from fl_ops.compare.summary import MEGABYTE
from fl_ops.compare.table import Table

Axis = Literal["rounds", "megabytes"]

AXES: tuple[Axis, ...] = ("rounds", "megabytes")

_COLOUR, _REFERENCE, _PALE, _INK = "#0b6e99", "#d1642e", "#d9d9d9", "#333333"
_COLUMNS = 4
_LABELS: dict[Axis, str] = {"rounds": "Rounds done", "megabytes": "Megabytes down and up, all clients"}
_FLOOR = 0.65
"""Panels start at this share of the best accuracy: the first rounds hardly differ, the last ones matter."""

Curve = tuple[list[float], list[float]]


def pictures(table: Table) -> Iterator[tuple[str, tuple[str, str], Axis]]:
    """(file name, (metric, split), axis) of every picture of a table."""
    for criterion, (number, split), axis in product(table.spec.report.criteria, enumerate(table.spec.splits), AXES):
        # The table's own metric has this name, whichever it is: pages refer to the file.
        metric = ACCURACY if criterion.metric == table.spec.report.metric else criterion.metric
        yield f"{metric}-by-{axis}{f'-{number + 1}' if number else ''}.png", (criterion.metric, split), axis


def draw(plan: Plan, of: tuple[str, str], axis: Axis, path: Path) -> bool:
    """Write the plot of (metric, split) as PNG. Returns False, without a file, if no run is finished.

    The first method of the table is in every panel, dashed. Lines are means over the seeds; bands span the lowest to
    the highest seed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metric, split = of
    group = (each for each in plan.experiments if (each.experiment.criterion.metric, each.experiment.split) == of)
    drawn = [each for each in group if _has_accuracies(each)]
    if not drawn:
        return False
    count = math.ceil(len(drawn) / _COLUMNS)
    figure = Figure(figsize=(11, 2.1 * count + 0.7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(count, _COLUMNS, sharex=True, sharey=True, squeeze=False).flatten()
    percent = in_percent(metric)
    scale = 100.0 if percent else 1.0
    curves = [_mean(_finite(each), axis) for each in drawn]
    for panel, each in zip(panels, drawn, strict=False):
        _panel(panel, each, curves, (axis, scale))
    for panel in panels[len(drawn) :]:
        panel.set_visible(False)
    for panel in panels[max(0, len(drawn) - _COLUMNS) : len(drawn)]:
        panel.tick_params(labelbottom=True)
    top = max(max(values) for _, values in curves)
    if percent:
        panels[0].set_ylim(100 * _FLOOR * top, 100 * top + 3)
    figure.supxlabel(_LABELS[axis], color=_INK, fontsize=10)
    figure.supylabel(f"Test {metric}{', %' if percent else ''}", color=_INK, fontsize=10)
    reference = drawn[0].experiment.method.label
    title = f"{plan.table.run.task.name}, {split}; dashed: {reference}; grey: all others"
    figure.suptitle(title, color=_INK, fontsize=11)
    figure.savefig(path)
    return True


def _panel(axes: Any, experiment: ExperimentPlan, curves: Sequence[Curve], drawn: tuple[Axis, float]) -> None:
    """drawn: the axis, and the factor of the values."""
    axis, scale = drawn
    for at, values in curves:
        axes.plot(at, _scaled(values, scale), color=_PALE, linewidth=0.7, zorder=1)
    at, values = curves[0]
    axes.plot(at, _scaled(values, scale), color=_REFERENCE, linewidth=1.1, linestyle=(0, (3, 2)), zorder=2)
    results = _finite(experiment)
    at, values = _mean(results, axis)
    low, high = ([choose(each) for each in _by_evaluation(results)] for choose in (min, max))
    axes.fill_between(at, _scaled(low, scale), _scaled(high, scale), color=_COLOUR, alpha=0.25, linewidth=0, zorder=3)
    axes.plot(at, _scaled(values, scale), color=_COLOUR, linewidth=1.6, zorder=4)
    axes.set_title(_title(experiment, len(results)), loc="left", color=_INK, fontsize=9.5, pad=3)
    axes.grid(axis="y", color="#ebebeb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8b8b8")
    axes.tick_params(colors=_INK, length=3, labelsize=8)


def _title(experiment: ExperimentPlan, finite: int) -> str:
    diverged = len(experiment.finals()) - finite
    return experiment.experiment.method.label + (f", {diverged} diverged" if diverged else "")


def _has_accuracies(experiment: ExperimentPlan) -> bool:
    return any(result.accuracies for result in _finite(experiment))


def _finite(experiment: ExperimentPlan) -> list[CellResult]:
    """Results of the final runs that did not diverge."""
    return [result for result in experiment.finals().values() if result.diverged is None]


def _by_evaluation(results: Sequence[CellResult]) -> list[tuple[float, ...]]:
    return list(zip(*(result.accuracies for result in results), strict=False))


def _mean(results: Sequence[CellResult], axis: Axis) -> Curve:
    at = [_positions(result, axis) for result in results]
    return list(map(fmean, zip(*at, strict=False))), list(map(fmean, _by_evaluation(results)))


def _positions(result: CellResult, axis: Axis) -> list[float]:
    """The position of each evaluation on the axis."""
    sums: list[float] = [row.round + 1.0 for row in result.rounds]
    if axis == "megabytes":
        sums = [total / MEGABYTE for total in accumulate(row.bytes_down + row.bytes_up for row in result.rounds)]
    return [total for total, row in zip(sums, result.rounds, strict=True) if row.accuracy is not None]


def _scaled(values: Sequence[float], scale: float) -> list[float]:
    return [scale * value for value in values]
