"""The files of a comparison: results.csv (a line for each round of each cell), summary.csv, summary.json and plots."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from fl_ops.compare.cells import ACCURACY, CellResult, in_percent
from fl_ops.compare.plan import Done, ExperimentPlan, Plan
from fl_ops.compare.summary import MEGABYTE, Row, Spread, rows, tried
from fl_ops.compare.table import Table
from fl_ops.environment import machine, versions
from fl_ops.render.figures import COLOURS, INK, csv_text, new_figure, plain_axes

_CELL = ("method", "split", "stage", "seed", "learning_rate", "parameters", "cell")
_ROUND = ("round", "accepted", "training_loss", "accuracy", "loss", "bytes_down", "bytes_up", "seconds")
_DIGITS = 5
_SPREADS = (
    "final", "last", "difference", "best",
    "rounds_to_target", "down_to_target", "up_to_target", "time_to_target", "down", "up",
)  # fmt: skip
"""Fields of a summary row that are spreads."""


def results_csv(plan: Plan) -> str:
    """A line for each round of each finished cell. A cell that diverged has fewer rounds."""
    report, done = plan.table.spec.report, plan.done_once()
    heads = [report.metric if name == ACCURACY else name for name in _ROUND]
    every_row = [row.measures for finished in done for row in finished.result.rounds]
    measures = sorted({name for measured in every_row for name in measured}.difference(report.also))
    lines = (
        [
            *_cell_values(finished),
            *_shortened(getattr(row.by(report.metric), name) for name in _ROUND),
            *_shortened(map(row.metrics.get, report.also)),
            *_shortened(map(row.measures.get, measures)),
        ]
        for finished in done
        for row in finished.result.rounds
    )
    return csv_text([*_CELL, *heads, *report.also, *measures], lines)


def summary_csv(plan: Plan) -> str:
    """A line for each metric, method and split, with mean, deviation and number of seeds of every spread."""
    heads = [f"{name}_{part}" for name in _SPREADS for part in ("mean", "deviation", "seeds")]
    columns = ["metric", "method", "split", "algorithm", "learning_rate", "parameters", "rate_at_edge"]
    columns += ["effective_decay", "seeds", "diverged"]
    summaries = rows(plan)
    measures = sorted({name for row in summaries for name in row.measured})
    further = [f"{name}_{part}" for name in measures for part in ("mean", "deviation", "seeds")]
    lines = (
        [*_summary_values(row), *(value for name in measures for value in _spread_values(row.measured.get(name)))]
        for row in summaries
    )
    return csv_text([*columns, *heads, "among_best", "seconds_a_round", *further], lines)


def summary_json(plan: Plan) -> str:
    """The summary, all settings that tuning tried, and all settings of the final runs."""
    spec = plan.table.spec
    summaries = [
        {**_row_values(row), "tried": _tried_values(plan, experiment), "settings": experiment.final_settings()}
        for row, experiment in zip(rows(plan), plan.experiments, strict=True)
    ]
    facts = {
        "table": plan.table.name,
        "seeds": spec.seeds,
        "tuning": spec.tuning.model_dump() if spec.tuning else None,
        "report": spec.report.model_dump(),
        "splits": spec.splits,
        "rows": summaries,
        "versions": versions(),
        "machine": machine(),
    }
    return json.dumps(facts, indent=1) + "\n"


def _row_values(row: Row) -> dict[str, Any]:
    """All fields; `measured` only if there is any."""
    return {name: value for name, value in asdict(row).items() if name != "measured" or value}


def parameters_text(parameters: Mapping[str, Any]) -> str:
    """Parameters as text: alpha 0.1, option II."""
    return ", ".join(f"{key} {_value_text(value)}" for key, value in parameters.items())


def _value_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell_values(done: Done) -> list[Any]:
    choice, cell = done.choice, done.cell
    text = parameters_text(choice.own)
    return [cell.label, cell.split, cell.stage, cell.seed, choice.learning_rate, text, cell.digest[:8]]


def _shortened(values: Iterable[Any]) -> list[Any]:
    return [round(value, _DIGITS) if isinstance(value, float) else value for value in values]


def _summary_values(row: Row) -> list[Any]:
    choice = row.choice
    spreads: Iterator[Spread | None] = (getattr(row, name) for name in _SPREADS)
    return [
        row.metric, row.label, row.split, row.algorithm,
        choice.learning_rate if choice else None, parameters_text(choice.own) if choice else None,
        row.at_edge, row.effective_decay, " ".join(map(str, row.seeds)), " ".join(map(str, row.diverged)),
        *(value for spread in spreads for value in _spread_values(spread)),
        row.among_best, _short(row.seconds_a_round),
    ]  # fmt: skip


def _spread_values(spread: Spread | None) -> list[Any]:
    return [_short(spread.mean), _short(spread.deviation), spread.count] if spread else [None, None, 0]


def _tried_values(plan: Plan, experiment: ExperimentPlan) -> list[dict[str, Any]]:
    settings = tried(plan, experiment)
    return [
        {**asdict(setting.choice), "validation": setting.validation, "judged": setting.judged} for setting in settings
    ]


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


Axis = Literal["rounds", "megabytes"]

AXES: tuple[Axis, ...] = ("rounds", "megabytes")

_COLOUR, _REFERENCE, _OTHERS = COLOURS[0], COLOURS[1], "#d9d9d9"
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
    metric, split = of
    drawn = [
        planned
        for planned in plan.experiments
        if (planned.experiment.criterion.metric, planned.experiment.split) == of
        and any(result.accuracies for result in _finite(planned))
    ]
    if not drawn:
        return False
    count = math.ceil(len(drawn) / _COLUMNS)
    figure = new_figure(figsize=(11, 2.1 * count + 0.7), dpi=110)
    panels = figure.subplots(count, _COLUMNS, sharex=True, sharey=True, squeeze=False).flatten()
    percent = in_percent(metric)
    scale = 100.0 if percent else 1.0
    curves = [_mean(_finite(planned), axis) for planned in drawn]
    for panel, planned in zip(panels, drawn, strict=False):
        _panel(panel, planned, curves, (axis, scale))
    for panel in panels[len(drawn) :]:
        panel.set_visible(False)
    for panel in panels[max(0, len(drawn) - _COLUMNS) : len(drawn)]:
        panel.tick_params(labelbottom=True)
    top = max(max(values) for _, values in curves)
    if percent:
        panels[0].set_ylim(100 * _FLOOR * top, 100 * top + 3)
    figure.supxlabel(_LABELS[axis], color=INK, fontsize=10)
    figure.supylabel(f"Test {metric}{', %' if percent else ''}", color=INK, fontsize=10)
    reference = drawn[0].experiment.method.label
    title = f"{plan.table.run.task.name}, {split}; dashed: {reference}; grey: all others"
    figure.suptitle(title, color=INK, fontsize=11)
    figure.savefig(path)
    return True


def _panel(axes: Any, experiment: ExperimentPlan, curves: Sequence[Curve], drawn: tuple[Axis, float]) -> None:
    """drawn: the axis, and the factor of the values."""
    axis, scale = drawn
    for at, values in curves:
        axes.plot(at, _scaled(values, scale), color=_OTHERS, linewidth=0.7, zorder=1)
    at, values = curves[0]
    axes.plot(at, _scaled(values, scale), color=_REFERENCE, linewidth=1.1, linestyle=(0, (3, 2)), zorder=2)
    results = _finite(experiment)
    at, values = _mean(results, axis)
    low, high = ([choose(points) for points in _by_evaluation(results)] for choose in (min, max))
    axes.fill_between(at, _scaled(low, scale), _scaled(high, scale), color=_COLOUR, alpha=0.25, linewidth=0, zorder=3)
    axes.plot(at, _scaled(values, scale), color=_COLOUR, linewidth=1.6, zorder=4)
    axes.set_title(_title(experiment, len(results)), loc="left", color=INK, fontsize=9.5, pad=3)
    plain_axes(axes)


def _title(experiment: ExperimentPlan, finite: int) -> str:
    diverged = len(experiment.finals()) - finite
    return experiment.experiment.method.label + (f", {diverged} diverged" if diverged else "")


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
