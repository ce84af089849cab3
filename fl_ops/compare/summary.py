"""What a comparison came to: one row for each method and split, with the spread over the seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from fl_ops.compare.cells import CellResult, Choice
from fl_ops.compare.line_plan import LinePlan
from fl_ops.compare.plan import Plan
from fl_ops.compare.tuning import score

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of `count` numbers; the deviation of one number is None."""

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None for no values."""
        if not values:
            return None
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Row:
    """A method on a split. Spreads are over the seeds that did not diverge; accuracies are shares of 1.

    last: mean of the last evaluations; it is what methods are compared by. rounds, down and up to the target are over
    the seeds that reached it, whose number is in them. Megabytes are 10^6 bytes of tensors.
    """

    label: str
    split: str
    algorithm: str
    choice: Choice | None
    at_edge: bool
    """The chosen rate is the lowest or the highest of the search: a better one may lie outside."""
    seeds: tuple[int, ...]
    diverged: tuple[int, ...]
    final: Spread | None = None
    last: Spread | None = None
    best: Spread | None = None
    rounds_to_target: Spread | None = None
    down_to_target: Spread | None = None
    up_to_target: Spread | None = None
    down: Spread | None = None
    up: Spread | None = None
    seconds_a_round: float | None = None
    among_best: bool = False
    """Its mean lies within one pooled deviation of the best mean of the split."""


def rows(plan: Plan) -> list[Row]:
    """A row for every line, in the table's order."""
    found = [_row(plan, line) for line in plan.lines]
    best = {split: _best([row for row in found if row.split == split]) for split in plan.table.own.splits}
    return [replace(row, among_best=_is_among(row, best[row.split])) for row in found]


def tried(plan: Plan, line: LinePlan) -> list[dict[str, Any]]:
    """What tuning tried for a line, as plain values; a validation accuracy of None is a run that diverged."""
    last = plan.table.own.report.last
    scores = [(choice, score(result, last)) for choice, result in line.tried()]
    return [
        {"learning_rate": choice.learning_rate, "parameters": choice.parameters,
         "validation": value if math.isfinite(value) else None}
        for choice, value in scores
    ]  # fmt: skip


def _row(plan: Plan, line: LinePlan) -> Row:
    own, finals = plan.table.own, line.finals()
    whole = [result for result in finals.values() if result.diverged is None]
    row = Row(
        label=line.line.method.label,
        split=line.line.split,
        algorithm=line.line.method.name,
        choice=line.choice,
        at_edge=_at_edge(line.choice, own.tuning.learning_rates if own.tuning else []),
        seeds=tuple(finals),
        diverged=tuple(seed for seed, result in finals.items() if result.diverged is not None),
    )
    return replace(row, **_accuracies(whole, own.report.last), **_costs(whole, own.report.target))


def _at_edge(choice: Choice | None, rates: Sequence[float]) -> bool:
    return choice is not None and len(rates) > 1 and choice.learning_rate in (min(rates), max(rates))


def _accuracies(results: Sequence[CellResult], last: int) -> dict[str, Any]:
    reached = [result.accuracies for result in results if result.accuracies]
    return {
        "final": Spread.of([values[-1] for values in reached]),
        "last": Spread.of([fmean(values[-last:]) for values in reached]),
        "best": Spread.of([max(values) for values in reached]),
    }


def _costs(results: Sequence[CellResult], target: float | None) -> dict[str, Any]:
    to_target = [upto for result in results if target and (upto := _rounds_to(result, target))]
    all_rounds = [len(result.rounds) for result in results]
    reaching = [result for result in results if target and _rounds_to(result, target)]
    seconds = [row.seconds for result in results for row in result.rounds]
    return {
        "rounds_to_target": Spread.of(to_target),
        "down_to_target": Spread.of(_megabytes(reaching, to_target, "bytes_down")),
        "up_to_target": Spread.of(_megabytes(reaching, to_target, "bytes_up")),
        "down": Spread.of(_megabytes(results, all_rounds, "bytes_down")),
        "up": Spread.of(_megabytes(results, all_rounds, "bytes_up")),
        "seconds_a_round": fmean(seconds) if seconds else None,
    }


def _rounds_to(result: CellResult, target: float) -> int | None:
    return next((row.round + 1 for row in result.rounds if row.accuracy is not None and row.accuracy >= target), None)


def _megabytes(results: Sequence[CellResult], rounds: Sequence[int], key: str) -> list[float]:
    pairs = zip(results, rounds, strict=True)
    return [sum(getattr(row, key) for row in result.rounds[:count]) / MEGABYTE for result, count in pairs]


def _best(found: Sequence[Row]) -> Row | None:
    whole = [row for row in found if row.last and not row.diverged]
    return max(whole, key=lambda row: row.last.mean if row.last else 0.0, default=None)


def _is_among(row: Row, best: Row | None) -> bool:
    """mean >= best mean - sqrt((s^2 + s_best^2) / 2), both without a diverged seed."""
    if best is None or best.last is None or row.last is None or row.diverged:
        return False
    deviations = [spread.deviation or 0.0 for spread in (row.last, best.last)]
    return row.last.mean >= best.last.mean - math.hypot(*deviations) / math.sqrt(2.0)
