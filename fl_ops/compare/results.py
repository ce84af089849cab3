"""The files for programs: results.csv, a line for each round of each cell; summary.csv and summary.json."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fl_ops.compare.cells import RoundRow
from fl_ops.compare.line_plan import Done
from fl_ops.compare.plan import Plan
from fl_ops.compare.summary import Row, Spread, rows, tried
from fl_ops.demo.facts import machine, versions

_CELL = ("method", "split", "stage", "seed", "learning_rate", "parameters", "cell")
_ROUND = ("round", "accepted", "training_loss", "accuracy", "loss", "bytes_down", "bytes_up", "seconds")
_DIGITS = 5
_SPREADS = ("final", "last", "best", "rounds_to_target", "down_to_target", "up_to_target", "down", "up")
"""Fields of a row that are spreads."""


def results_csv(plan: Plan) -> str:
    """A line for each round of each cell that is done; a cell that diverged has fewer than it should."""
    done = [each for line in plan.lines for each in line.done()]
    return _csv([*_CELL, *_ROUND], ([*_of_cell(each), *_of_round(row)] for each in done for row in each.result.rounds))


def summary_csv(plan: Plan) -> str:
    """A line for each method and split; of every spread the mean and the deviation, over how many seeds it goes."""
    heads = [f"{name}_{part}" for name in _SPREADS for part in ("mean", "deviation", "seeds")]
    plain = ["method", "split", "algorithm", "learning_rate", "parameters", "rate_at_edge", "seeds", "diverged"]
    return _csv([*plain, *heads, "among_best", "seconds_a_round"], map(_summary_values, rows(plan)))


def summary_json(plan: Plan) -> str:
    """Everything of the summary, what tuning tried, and every setting and option."""
    own = plan.table.own
    found = [
        {**asdict(row), "tried": tried(plan, line), "settings": line.final_settings()}
        for row, line in zip(rows(plan), plan.lines, strict=True)
    ]
    facts = {
        "table": plan.table.name,
        "seeds": own.seeds,
        "tuning": own.tuning.model_dump() if own.tuning else None,
        "report": own.report.model_dump(),
        "splits": own.splits,
        "rows": found,
        "versions": versions(),
        "machine": machine(),
    }
    return json.dumps(facts, indent=1) + "\n"


def parameters_text(parameters: Mapping[str, Any]) -> str:
    """alpha 0.1, option II."""
    return ", ".join(f"{key} {_in_words(value)}" for key, value in parameters.items())


def _in_words(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _of_cell(done: Done) -> list[Any]:
    choice, cell = done.choice, done.cell
    text = parameters_text(choice.parameters)
    return [cell.label, cell.split, cell.stage, cell.seed, choice.learning_rate, text, cell.digest[:8]]


def _of_round(row: RoundRow) -> list[Any]:
    values = (getattr(row, name) for name in _ROUND)
    return [round(value, _DIGITS) if isinstance(value, float) else value for value in values]


def _summary_values(row: Row) -> list[Any]:
    choice = row.choice
    spreads: Iterator[Spread | None] = (getattr(row, name) for name in _SPREADS)
    return [
        row.label, row.split, row.algorithm,
        choice.learning_rate if choice else None, parameters_text(choice.parameters) if choice else None,
        row.at_edge, _joined(row.seeds), _joined(row.diverged),
        *(value for spread in spreads for value in _spread_values(spread)),
        row.among_best, _short(row.seconds_a_round),
    ]  # fmt: skip


def _spread_values(spread: Spread | None) -> list[Any]:
    return [_short(spread.mean), _short(spread.deviation), spread.count] if spread else [None, None, 0]


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
