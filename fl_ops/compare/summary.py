"""The results of a comparison: one row for each method and split, with the spread over the seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from algorithms import build
from fl_ops.compare.cells import CellResult, Choice
from fl_ops.compare.plan import ExperimentPlan, Plan
from fl_ops.compare.tuning import score
from fl_server.rounds.metrics import Criterion

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

    @property
    def standard_error(self) -> float | None:
        """The standard error of the mean; None with one number."""
        return None if self.deviation is None else self.deviation / math.sqrt(self.count)


@dataclass(frozen=True)
class Row:
    """A method on a split. Spreads are over the seeds that did not diverge; accuracies are shares of 1.

    last: mean of the last evaluations, by which methods are compared. Rounds and megabytes to the target are over the
    seeds that reached it; their `count` is the number of these seeds. A megabyte is 10^6 tensor bytes.
    """

    label: str
    split: str
    metric: str
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
    lasts: dict[int, float] = field(default_factory=dict)
    """Seed -> the value whose mean and deviation are `last`."""
    difference: Spread | None = None
    """The difference of `lasts` to the baseline's, seed by seed; None for the baseline itself and without one."""
    best: Spread | None = None
    rounds_to_target: Spread | None = None
    down_to_target: Spread | None = None
    up_to_target: Spread | None = None
    time_to_target: Spread | None = None
    """Seconds of simulated time; None without [simulation.system]."""
    down: Spread | None = None
    up: Spread | None = None
    seconds_a_round: float | None = None
    measured: dict[str, Spread] = field(default_factory=dict)
    """Name -> what the runs measured beyond the server's evaluations, after the last round; see `CellResult`."""
    among_best: bool = False
    """The mean is within one pooled deviation of the best mean of the split."""


@dataclass(frozen=True)
class Tried:
    """A setting of a search. An accuracy of None is a run that diverged."""

    choice: Choice
    validation: float | None
    """The accuracy of the short run."""
    judged: list[float | None] = field(default_factory=list)
    """The scores of the runs with all rounds, seed by seed; empty if the setting was not judged."""


def rows(plan: Plan) -> list[Row]:
    """A row for every experiment, in the table's order."""
    own = [_row(plan, experiment) for experiment in plan.experiments]
    return [row for criterion in plan.table.spec.report.criteria for row in _compared(plan, criterion, own)]


def _compared(plan: Plan, criterion: Criterion, own: Sequence[Row]) -> list[Row]:
    """The rows of a metric, in the table's order, with what depends on other rows of their split."""
    compared: list[Row] = []
    for split in plan.table.spec.splits:
        group = [row for row in own if (row.split, row.metric) == (split, criterion.metric)]
        best = next(iter(ranked(group, criterion)), None)
        baseline = next((row for row in group if row.label == plan.table.spec.report.baseline), None)
        for row in group:
            difference = paired(row, baseline) if baseline and row is not baseline else None
            compared.append(replace(row, among_best=_is_among(row, best, criterion), difference=difference))
    return compared


def paired(row: Row, other: Row) -> Spread | None:
    """The differences of two rows' `lasts` under the same seeds; None without a common seed."""
    return Spread.of([value - other.lasts[seed] for seed, value in row.lasts.items() if seed in other.lasts])


def ranked(compared: Sequence[Row], criterion: Criterion) -> list[Row]:
    """The rows of which no seed diverged, by the mean of `last`, the best one first."""
    finite = [row for row in compared if row.last and math.isfinite(row.last.mean) and not row.diverged]
    sign = 1.0 if criterion.lower_is_better else -1.0
    return sorted(finite, key=lambda row: sign * row.last.mean if row.last else 0.0)


def tried(plan: Plan, experiment: ExperimentPlan) -> list[Tried]:
    """The settings that the search tried, in order, with their accuracies on the validation data."""
    last, criterion = plan.table.spec.report.last, experiment.experiment.criterion
    settings: list[Tried] = []
    for trial, result in experiment.searched():
        value = score(result, last, criterion)
        accuracy = (-value if criterion.lower_is_better else value) if math.isfinite(value) else None
        if trial.stage == "tuning":
            settings.append(Tried(trial.choice, accuracy))
        else:
            next(setting for setting in settings if setting.choice == trial.choice).judged.append(accuracy)
    return settings


def _row(plan: Plan, experiment: ExperimentPlan) -> Row:
    spec, finals, criterion = plan.table.spec, experiment.finals(), experiment.experiment.criterion
    finite = {seed: result for seed, result in finals.items() if result.diverged is None}
    target = spec.report.target_of(criterion.metric)
    row = Row(
        label=experiment.experiment.method.label,
        split=experiment.experiment.split,
        metric=criterion.metric,
        algorithm=experiment.experiment.method.name,
        published=experiment.experiment.method.published.get(experiment.experiment.split),
        choice=experiment.choice,
        at_edge=experiment.at_edge,
        effective_decay=_effective_decay(plan, experiment),
        seeds=tuple(finals),
        diverged=tuple(seed for seed, result in finals.items() if result.diverged is not None),
    )
    reached = _accuracies(finite, spec.report.last, criterion)
    costs = _costs(list(finite.values()), criterion, target)
    return replace(row, **reached, **costs, measured=_measured(list(finite.values())))


def _measured(results: Sequence[CellResult]) -> dict[str, Spread]:
    measured = [result.measured for result in results]
    names = sorted({name for values in measured for name in values})
    spreads = {name: Spread.of([values[name] for values in measured if name in values]) for name in names}
    return {name: spread for name, spread in spreads.items() if spread is not None}


def _effective_decay(plan: Plan, experiment: ExperimentPlan) -> float | None:
    choice = experiment.choice
    if choice is None:
        return None
    algorithm = build(experiment.experiment.method.name, **choice.parameters)
    decay = float(plan.table.local(choice)["weight_decay"])
    return decay * algorithm.decay_factor if decay else 0.0


def decays_differ(compared: Sequence[Row]) -> bool:
    """Whether the rows have been trained with different effective weight decays."""
    known = [row.effective_decay for row in compared if row.effective_decay is not None]
    return any(not math.isclose(decay, known[0], rel_tol=1e-6) for decay in known)


def _accuracies(results: Mapping[int, CellResult], last: int, criterion: Criterion) -> dict[str, Any]:
    """results: by seed; last: number of evaluations."""
    best = min if criterion.lower_is_better else max
    reached = {seed: result.accuracies for seed, result in results.items() if result.accuracies}
    lasts = {seed: fmean(values[-last:]) for seed, values in reached.items()}
    return {
        "final": Spread.of([values[-1] for values in reached.values()]),
        "last": Spread.of(list(lasts.values())),
        "lasts": lasts,
        "best": Spread.of([best(values) for values in reached.values()]),
    }


def _costs(results: Sequence[CellResult], criterion: Criterion, target: float | None) -> dict[str, Any]:
    upto = [_rounds_to(result, criterion, target) for result in results]
    to_target = [count for count in upto if count]
    all_rounds = [len(result.rounds) for result in results]
    reached = [result for result, count in zip(results, upto, strict=True) if count]
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


def _rounds_to(result: CellResult, criterion: Criterion, target: float | None) -> int | None:
    """The number of rounds until the target was first reached; None without a target, or if it never was."""
    if target is None:
        return None
    values = ((row.round + 1, row.accuracy) for row in result.rounds if row.accuracy is not None)
    return next((count for count, value in values if criterion.reaches(value, target)), None)


def _megabytes(results: Sequence[CellResult], rounds: Sequence[int], key: str) -> list[float]:
    pairs = zip(results, rounds, strict=True)
    return [sum(getattr(row, key) for row in result.rounds[:count]) / MEGABYTE for result, count in pairs]


def _simulated(results: Sequence[CellResult], rounds: Sequence[int]) -> list[float]:
    """The simulated time at the end of so many rounds of each result, where it has any."""
    ends = [result.rounds[count - 1].simulated_total_s for result, count in zip(results, rounds, strict=True)]
    return [end for end in ends if end is not None]


def _is_among(row: Row, best: Row | None, criterion: Criterion) -> bool:
    """Whether the mean is at most sqrt((s^2 + s_best^2) / 2) worse than the best, and no seed of either diverged."""
    if best is None or best.last is None or row.last is None or row.diverged:
        return False
    deviations = [spread.deviation or 0.0 for spread in (row.last, best.last)]
    behind = best.last.mean - row.last.mean
    return (-behind if criterion.lower_is_better else behind) <= math.hypot(*deviations) / math.sqrt(2.0)
