"""The results of a comparison: one row for each method and split, with the spread over the seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from algorithms import build
from fl_ops.compare.cells import CellResult, Choice
from fl_ops.compare.plan import ExperimentPlan, Plan
from fl_ops.compare.table import ReportSection
from fl_ops.compare.tuning import score
from fl_server.rounds.directions import Criterion

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of `count` numbers; with one number, the deviation is None."""

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

    last: mean of the last evaluations, by which methods are compared. Rounds and megabytes to the target are over the
    seeds that reached it; their `count` is the number of these seeds. A megabyte is 10^6 tensor bytes.
    """

    label: str
    split: str
    algorithm: str
    published: float | None
    """Accuracy in a paper."""
    choice: Choice | None
    at_edge: bool
    """The chosen rate is the lowest or the highest of the search; a better one may be beyond it."""
    effective_decay: float | None
    """The weight decay that a plain method would need for the same stationary points; None without a choice."""
    seeds: tuple[int, ...]
    diverged: tuple[int, ...]
    final: Spread | None = None
    last: Spread | None = None
    best: Spread | None = None
    rounds_to_target: Spread | None = None
    down_to_target: Spread | None = None
    up_to_target: Spread | None = None
    time_to_target: Spread | None = None
    """Seconds of simulated time; None without [simulation.system]."""
    down: Spread | None = None
    up: Spread | None = None
    seconds_a_round: float | None = None
    among_best: bool = False
    """The mean is within one pooled deviation of the best mean of the split."""


@dataclass(frozen=True)
class Tried:
    """A setting of a search. An accuracy of None is a run that diverged."""

    choice: Choice
    validation: float | None
    """Of the short run."""
    judged: list[float | None] = field(default_factory=list)
    """Of the runs with all rounds, seed by seed; empty if the setting was not judged."""


def rows(plan: Plan) -> list[Row]:
    """A row for every experiment, in the table's order."""
    found = [_row(plan, experiment) for experiment in plan.experiments]
    criterion = plan.table.spec.report.criterion
    best = {split: _best([row for row in found if row.split == split], criterion) for split in plan.table.spec.splits}
    return [replace(row, among_best=_is_among(row, best[row.split], criterion)) for row in found]


def tried(plan: Plan, experiment: ExperimentPlan) -> list[Tried]:
    """The settings that the search tried, in order, with their accuracies on the validation data."""
    last, criterion = plan.table.spec.report.last, plan.table.spec.report.criterion
    found: list[Tried] = []
    for trial, result in experiment.searched():
        value = score(result, last, criterion)
        accuracy = (-value if criterion.lower_is_better else value) if math.isfinite(value) else None
        if trial.stage == "tuning":
            found.append(Tried(trial.choice, accuracy))
        else:
            next(one for one in found if one.choice == trial.choice).judged.append(accuracy)
    return found


def _row(plan: Plan, experiment: ExperimentPlan) -> Row:
    spec, finals = plan.table.spec, experiment.finals()
    finite = [result for result in finals.values() if result.diverged is None]
    row = Row(
        label=experiment.experiment.method.label,
        split=experiment.experiment.split,
        algorithm=experiment.experiment.method.name,
        published=experiment.experiment.method.published.get(experiment.experiment.split),
        choice=experiment.choice,
        at_edge=experiment.at_edge,
        effective_decay=_effective_decay(plan, experiment),
        seeds=tuple(finals),
        diverged=tuple(seed for seed, result in finals.items() if result.diverged is not None),
    )
    return replace(row, **_accuracies(finite, spec.report), **_costs(finite, spec.report))


def _effective_decay(plan: Plan, experiment: ExperimentPlan) -> float | None:
    choice = experiment.choice
    if choice is None:
        return None
    algorithm = build(experiment.experiment.method.name, **choice.parameters)
    decay = float(plan.table.local(choice)["weight_decay"])
    return decay * algorithm.decay_factor if decay else 0.0


def decays_differ(found: Sequence[Row]) -> bool:
    """Whether the rows have been trained with different effective weight decays."""
    known = [row.effective_decay for row in found if row.effective_decay is not None]
    return any(not math.isclose(decay, known[0], rel_tol=1e-6) for decay in known)


def _accuracies(results: Sequence[CellResult], report: ReportSection) -> dict[str, Any]:
    last, best = report.last, min if report.criterion.lower_is_better else max
    reached = [result.accuracies for result in results if result.accuracies]
    return {
        "final": Spread.of([values[-1] for values in reached]),
        "last": Spread.of([fmean(values[-last:]) for values in reached]),
        "best": Spread.of([best(values) for values in reached]),
    }


def _costs(results: Sequence[CellResult], report: ReportSection) -> dict[str, Any]:
    to_target = [upto for result in results if (upto := _rounds_to(result, report))]
    all_rounds = [len(result.rounds) for result in results]
    reached = [result for result in results if _rounds_to(result, report)]
    seconds = [row.seconds for result in results for row in result.rounds]
    return {
        "rounds_to_target": Spread.of(to_target),
        "down_to_target": Spread.of(_megabytes(reached, to_target, "bytes_down")),
        "up_to_target": Spread.of(_megabytes(reached, to_target, "bytes_up")),
        "time_to_target": Spread.of(_simulated(reached, to_target)),
        "down": Spread.of(_megabytes(results, all_rounds, "bytes_down")),
        "up": Spread.of(_megabytes(results, all_rounds, "bytes_up")),
        "seconds_a_round": fmean(seconds) if seconds else None,
    }


def _rounds_to(result: CellResult, report: ReportSection) -> int | None:
    """The number of rounds until the target was first reached; None without a target, or if it never was."""
    if report.target is None:
        return None
    values = ((row.round + 1, row.accuracy) for row in result.rounds if row.accuracy is not None)
    return next((count for count, value in values if report.criterion.reaches(value, report.target)), None)


def _megabytes(results: Sequence[CellResult], rounds: Sequence[int], key: str) -> list[float]:
    pairs = zip(results, rounds, strict=True)
    return [sum(getattr(row, key) for row in result.rounds[:count]) / MEGABYTE for result, count in pairs]


def _simulated(results: Sequence[CellResult], rounds: Sequence[int]) -> list[float]:
    """The simulated time at the end of so many rounds of each result, where it has any."""
    ends = [result.rounds[count - 1].simulated_total_s for result, count in zip(results, rounds, strict=True)]
    return [end for end in ends if end is not None]


def _best(found: Sequence[Row], criterion: Criterion) -> Row | None:
    finite = [row for row in found if row.last and math.isfinite(row.last.mean) and not row.diverged]
    best = min if criterion.lower_is_better else max
    return best(finite, key=lambda row: row.last.mean if row.last else 0.0, default=None)


def _is_among(row: Row, best: Row | None, criterion: Criterion) -> bool:
    """At most sqrt((s^2 + s_best^2) / 2) worse than the best mean, if no seed of either diverged."""
    if best is None or best.last is None or row.last is None or row.diverged:
        return False
    deviations = [spread.deviation or 0.0 for spread in (row.last, best.last)]
    behind = best.last.mean - row.last.mean
    return (-behind if criterion.lower_is_better else behind) <= math.hypot(*deviations) / math.sqrt(2.0)
