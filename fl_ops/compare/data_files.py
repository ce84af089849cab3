"""The data files of a comparison: results.csv (a line for each round of each cell), summary.csv and summary.json."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fl_ops.compare.cells import ACCURACY, RoundRow
from fl_ops.compare.plan import Done, ExperimentPlan, Plan
from fl_ops.compare.summary import Row, Spread, rows, tried
from fl_ops.environment import machine, versions

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
    lines = (
        [*_cell_values(each), *_round_values(row.by(report.metric)), *_shortened(map(row.metrics.get, report.also))]
        for each in done
        for row in each.result.rounds
    )
    return _csv([*_CELL, *heads, *report.also], lines)


def summary_csv(plan: Plan) -> str:
    """A line for each metric, method and split, with mean, deviation and number of seeds of every spread."""
    heads = [f"{name}_{part}" for name in _SPREADS for part in ("mean", "deviation", "seeds")]
    columns = ["metric", "method", "split", "algorithm", "learning_rate", "parameters", "rate_at_edge"]
    columns += ["effective_decay", "seeds", "diverged"]
    return _csv([*columns, *heads, "among_best", "seconds_a_round"], map(_summary_values, rows(plan)))


def summary_json(plan: Plan) -> str:
    """The summary, all settings that tuning tried, and all settings of the final runs."""
    spec = plan.table.spec
    found = [
        {**asdict(row), "tried": _tried_values(plan, experiment), "settings": experiment.final_settings()}
        for row, experiment in zip(rows(plan), plan.experiments, strict=True)
    ]
    facts = {
        "table": plan.table.name,
        "seeds": spec.seeds,
        "tuning": spec.tuning.model_dump() if spec.tuning else None,
        "report": spec.report.model_dump(),
        "splits": spec.splits,
        "rows": found,
        "versions": versions(),
        "machine": machine(),
    }
    return json.dumps(facts, indent=1) + "\n"


def parameters_text(parameters: Mapping[str, Any]) -> str:
    """Parameters as text: alpha 0.1, option II."""
    return ", ".join(f"{key} {_value_text(value)}" for key, value in parameters.items())


def _value_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell_values(done: Done) -> list[Any]:
    choice, cell = done.choice, done.cell
    text = parameters_text(choice.own)
    return [cell.label, cell.split, cell.stage, cell.seed, choice.learning_rate, text, cell.digest[:8]]


def _round_values(row: RoundRow) -> list[Any]:
    return _shortened(getattr(row, name) for name in _ROUND)


def _shortened(values: Iterable[Any]) -> list[Any]:
    return [round(value, _DIGITS) if isinstance(value, float) else value for value in values]


def _summary_values(row: Row) -> list[Any]:
    choice = row.choice
    spreads: Iterator[Spread | None] = (getattr(row, name) for name in _SPREADS)
    return [
        row.metric, row.label, row.split, row.algorithm,
        choice.learning_rate if choice else None, parameters_text(choice.own) if choice else None,
        row.at_edge, row.effective_decay, _joined(row.seeds), _joined(row.diverged),
        *(value for spread in spreads for value in _spread_values(spread)),
        row.among_best, _short(row.seconds_a_round),
    ]  # fmt: skip


def _spread_values(spread: Spread | None) -> list[Any]:
    return [_short(spread.mean), _short(spread.deviation), spread.count] if spread else [None, None, 0]


def _tried_values(plan: Plan, experiment: ExperimentPlan) -> list[dict[str, Any]]:
    found = tried(plan, experiment)
    return [{**asdict(one.choice), "validation": one.validation, "judged": one.judged} for one in found]


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _joined(seeds: Sequence[int]) -> str:
    return " ".join(map(str, seeds))


def _csv(heads: Sequence[str], lines: Any) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(lines)
    return text.getvalue()
