"""Metrics by which models are compared, statistics over many clients, and the stop rules: a target or a patience.

A run's file or its task says which value is better. The table here has the names whose direction is the same for
everybody. The direction of any other name is unknown: nothing is guessed from a part of a name.
Names that begin with "clients_" are of the clients' evaluations; all others are of the server's. Names that begin with
"averaged_" or "clients_averaged_" are of the averaged model.

Stop rules use one metric of the evaluations of committed rounds, in the direction of the run's criterion. A value that
is absent, NaN or infinite is no value: it reaches no target and is never better, but the evaluation still counts
towards `patience`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from fl_server.rounds.events import Source, counted

LOSS = "loss"
"""The metric of a run that names none."""
PREFIX = "clients_"
"""Begins the name of a metric of the clients' evaluations."""
AVERAGED = "averaged_"
"""Begins the name of a metric of the averaged model, after PREFIX if clients measured it. Other names are of the latest
model."""
TRAINING = "training_"
"""Begins the name of a metric that clients measured on their training examples, after PREFIX: in a simulation."""
RECEIVED = "received_"
"""Begins the name of a metric of the model that a round's clients received, after PREFIX: of the round before."""
WITHOUT_PERSONAL = "_without_personal"
"""Ends the name of a metric that a client measured with the initial values of its personal parameters."""
_LOWER = (
    "loss", "error", "error_rate", "mae", "mse", "rmse", "mape", "nll", "cross_entropy", "log_loss", "perplexity",
    "wer", "cer", "brier", "brier_score", "ece",
)  # fmt: skip
_HIGHER = (
    "accuracy", "balanced_accuracy", "top5_accuracy", "precision", "recall", "f1", "f1_macro", "f1_micro", "auc",
    "auroc", "roc_auc", "average_precision", "r2", "mcc", "iou", "mean_iou", "dice", "bleu",
)  # fmt: skip
WELL_KNOWN: Mapping[str, bool] = MappingProxyType({name: name in _LOWER for name in (*_LOWER, *_HIGHER)})
"""Metric -> whether a lower value is better."""
EVALUATED = "clients_evaluated"
"""Number of clients that reported; present once their evaluation is over, even if it is 0."""
ClientMetrics = tuple[int, Mapping[str, float]]
"""(examples, means over them by the task's names) of one client."""
STATISTICS = {"mean": "mean", "deviation": "std", "worst_decile": "worst_decile", "best_decile": "best_decile"}
"""Statistic over clients -> suffix of its name in `summary`."""
Evaluation = tuple[int, Mapping[str, float]]
"""(round, metrics by name)."""
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Criterion:
    """The metric by which models are compared, and its direction."""

    metric: str = LOSS
    lower_is_better: bool = True

    def better(self, a: float | None, b: float | None) -> bool:
        """Whether `a` is a better value than `b`. No value is never better; a value is better than none.

        NaN and infinity are no values.
        """
        if a is None or not math.isfinite(a):
            return False
        if b is None or not math.isfinite(b):
            return True
        return a < b if self.lower_is_better else a > b

    def reaches(self, value: float, target: float) -> bool:
        """Whether a finite value is at least as good as the target."""
        return math.isfinite(value) and not self.better(target, value)


BY_LOSS, BY_ACCURACY = Criterion(), Criterion("accuracy", lower_is_better=False)
"""The lowest loss, and the highest accuracy."""


@dataclass(frozen=True, slots=True)
class Directions:
    """The directions that a run knows."""

    declared: Mapping[str, bool] = field(default_factory=dict)
    """Metric -> whether a lower value is better, by the run's file and its task. They go before the table."""

    def lower_is_better(self, metric: str) -> bool | None:
        """The direction of a metric, also of the clients' statistics of one; None if it is unknown.

        A smaller standard deviation over clients is better, of every metric.
        """
        if (known := self._known(metric)) is not None or not metric.startswith(PREFIX):
            return known
        own = metric.removeprefix(PREFIX)
        if own.endswith("_std"):
            return True
        for ending in ("", "_mean", "_worst_decile", "_best_decile"):
            for base in (own.removesuffix(ending), own.removesuffix(ending).removesuffix(WITHOUT_PERSONAL)):
                if own.endswith(ending) and (known := self._known(base)) is not None:
                    return known
        return None

    def _known(self, metric: str) -> bool | None:
        own = metric.removeprefix(AVERAGED)
        return self.declared.get(metric, self.declared.get(own, WELL_KNOWN.get(own)))


def of_averaged(metric: str) -> bool:
    """Whether a metric is of the averaged model: of the server's evaluation, or of the clients'."""
    return metric.removeprefix(PREFIX).startswith(AVERAGED)


def as_training(metrics: Mapping[str, float]) -> dict[str, float]:
    """A `summary` over the clients' training examples, under names beside those of their held-out examples."""
    return {f"{PREFIX}{TRAINING}{name.removeprefix(PREFIX)}": value for name, value in metrics.items()}


def as_averaged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of the averaged model under their names beside those of the latest model."""
    return {f"{AVERAGED}{name}": value for name, value in metrics.items()}


def as_received(evaluated: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Means over the examples of a round's clients, of the model that they received: secure aggregation sums no others.

    evaluated: the number of clients that measured; 0: nothing was measured.
    """
    if not evaluated:
        return {}
    values = {f"{PREFIX}{RECEIVED}{name}": value for name, value in metrics.items()}
    return {f"{PREFIX}{RECEIVED}evaluated": float(evaluated), **values}


def by_clients(metric: str) -> bool:
    """Whether a metric comes from clients."""
    return metric.startswith(PREFIX)


def has_evaluation(metrics: Mapping[str, float], metric: str) -> bool:
    """Whether a round's metrics include the evaluation to which `metric` belongs: the clients' or the server's.

    And of which model: that of the averaged one may begin later.
    """
    if of_averaged(metric):
        return any(of_averaged(name) and by_clients(name) == by_clients(metric) for name in metrics)
    if by_clients(metric):
        return EVALUATED in metrics
    return not all(map(by_clients, metrics))


def on_server(metric: str) -> str:
    """The server's metric of the same name for one that clients measured; a deviation over clients has none."""
    if not by_clients(metric) or metric.endswith("_std"):
        return metric
    own = metric.removeprefix(PREFIX)
    for ending in ("_mean", "_worst_decile", "_best_decile"):
        own = own.removesuffix(ending)
    return own


def with_own(metrics: Mapping[str, float], without: Mapping[str, float]) -> dict[str, float]:
    """One client's metrics with its personal parameters, and those without them under names of their own."""
    return {**metrics, **{f"{name}{WITHOUT_PERSONAL}": value for name, value in without.items()}}


def spread(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The statistics over clients in a round's metrics, by the task's metric name.

    The deciles are absent for a metric whose direction is unknown.
    """
    by_metric = {}
    for name in metrics:
        own = name.removeprefix(PREFIX)
        values = {statistic: metrics.get(f"{PREFIX}{own}_{ending}") for statistic, ending in STATISTICS.items()}
        if by_clients(name) and values["mean"] is not None and values["deviation"] is not None:
            by_metric[own] = {statistic: value for statistic, value in values.items() if value is not None}
    return by_metric


def summary(evaluations: Sequence[ClientMetrics], directions: Directions) -> dict[str, float]:
    """Mean, standard deviation, worst and best decile over clients, for each metric that more than half of them report.

    For a metric "accuracy" of n clients with values a_i over e_i examples:

        clients_accuracy_mean           sum a_i / n: every client alike
        clients_accuracy_std            sqrt(sum (a_i - mean)^2 / n), of the population
        clients_accuracy_worst_decile   mean of the ceil(n / 10) worst a_i; absent if the direction is unknown
        clients_accuracy_best_decile    the same of the best a_i
        clients_accuracy                sum e_i a_i / sum e_i: every example alike

    and `clients_evaluated`, the number of clients. The order of the clients changes no bit. A metric that only few
    clients report is left out.
    """
    names = {name for _, metrics in evaluations for name in metrics}
    rows = {name: [(count, metrics[name]) for count, metrics in evaluations if name in metrics] for name in names}
    result = {EVALUATED: float(len(evaluations))}
    for name in sorted(names):
        if 2 * len(rows[name]) > len(evaluations):
            result.update(_of_one(name, rows[name], directions))
    return result


def with_pooled(metrics: Mapping[str, float], sums_of: Iterable[str], values: Mapping[str, float]) -> dict[str, float]:
    """The summary with the values that were computed from the sums of all clients, in place of means over examples.

    sums_of: the metrics that have sums, also those without a value.
    """
    own = tuple(f"{PREFIX}{name}" for name in sums_of)
    means = {name for name in metrics if name in own or name.startswith(tuple(f"{summed}/" for summed in own))}
    statistics = {name for name in means if name.endswith(tuple(f"_{ending}" for ending in STATISTICS.values()))}
    kept = {name: value for name, value in metrics.items() if name not in means - statistics}
    return {**kept, **{f"{PREFIX}{name}": value for name, value in values.items()}}


def _of_one(name: str, rows: Sequence[tuple[int, float]], directions: Directions) -> dict[str, float]:
    values = [value for _, value in rows]
    mean = math.fsum(values) / len(values)
    spread_of = {
        f"{PREFIX}{name}": math.fsum(count * value for count, value in rows) / sum(count for count, _ in rows),
        f"{PREFIX}{name}_mean": mean,
        f"{PREFIX}{name}_std": math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)),
    }
    if (lower := directions.lower_is_better(f"{PREFIX}{name}")) is not None:
        worst_first, tenth = sorted(values, reverse=lower), math.ceil(len(values) / 10)
        spread_of[f"{PREFIX}{name}_worst_decile"] = math.fsum(worst_first[:tenth]) / tenth
        spread_of[f"{PREFIX}{name}_best_decile"] = math.fsum(worst_first[-tenth:]) / tenth
    return spread_of


@dataclass(frozen=True, slots=True)
class StopPolicy:
    """Criterion, target and patience."""

    criterion: Criterion = BY_LOSS
    target: float | None = None
    """The run ends when the metric is at least as good as this. None: no target."""
    patience: int = 0
    """Evaluations without a better value after which the run ends. 0: never."""

    @property
    def uses_metrics(self) -> bool:
        """Whether an evaluation can end the run: then each must be awaited before the next round."""
        return self.target is not None or self.patience > 0


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far."""

    round: int
    value: float


def best_round(criterion: Criterion, evaluations: Sequence[Evaluation]) -> Best | None:
    """The evaluation with the best value; of equals the earliest. None if no evaluation has a value.

    `evaluations` may come in any order: an evaluation that was backfilled after a restart comes late.
    """
    best: Best | None = None
    for round, metrics in _in_order(evaluations):
        value = metrics.get(criterion.metric)
        if value is not None and criterion.better(value, best.value if best else None):
            best = Best(round, value)
    return best


@dataclass(frozen=True, slots=True)
class Judged:
    """Earlier evaluations as far as `patience` needs them. None has reached a target: that would have ended the run."""

    best: Best | None = None
    waited: int = 0
    """Evaluations after the best one; all of them if none had a value."""

    def after(self, criterion: Criterion, evaluation: Evaluation) -> Judged:
        """The state after the next evaluation, in order of round."""
        round, metrics = evaluation
        value = metrics.get(criterion.metric)
        if value is not None and criterion.better(value, self.best.value if self.best else None):
            return Judged(Best(round, value))
        return Judged(self.best, self.waited + 1)


def stop_reason(policy: StopPolicy, evaluations: Sequence[Evaluation], earlier: Judged = Judged()) -> str | None:
    """Why the run ends after these evaluations; None if it continues.

    Give only the evaluations since the run was created or last extended: older ones would end it again at once.
    earlier: those of them that came before `evaluations`.
    """
    return _target_reached(policy, evaluations) or _patience_over(policy, evaluations, earlier)


def missing_metric(metric: str, metrics: Mapping[str, float], by: Source) -> str:
    """Why the stop rules cannot work: an evaluation of their source lacks their metric; empty if it has it.

    An evaluation that no client answered, and one from before the first averaged model, tell nothing.
    """
    from_here = metrics.get(EVALUATED, 0.0) > 0 if by_clients(metric) else by == "server" and bool(metrics)
    if not from_here or (of_averaged(metric) and not any(map(of_averaged, metrics))):
        return ""
    names = [name for name in metrics if name != EVALUATED]
    return "" if metric in names else f"stop.metric: expected {reported_metrics(metric, names)}, got {metric}"


def reported_metrics(metric: str, names: Collection[str]) -> str:
    """What a metric should be instead: one of those that its source reports."""
    shown = sorted(names)[:_SHOWN]
    more = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
    reporters = "clients report" if by_clients(metric) else "the task reports"
    return f"a metric that {reporters} ({', '.join(shown) or 'none'}{more})"


def _target_reached(policy: StopPolicy, evaluations: Sequence[Evaluation]) -> str | None:
    metric, target = policy.criterion.metric, policy.target
    if target is None:
        return None
    for round, metrics in _in_order(evaluations):
        value = metrics.get(metric)
        if value is not None and policy.criterion.reaches(value, target):
            return f"{metric} reached {value:.6g}, the target is {target:.6g}, in round {round}"
    return None


def _patience_over(policy: StopPolicy, evaluations: Sequence[Evaluation], earlier: Judged) -> str | None:
    judged, metric = earlier, policy.criterion.metric
    for evaluation in _in_order(evaluations):
        judged = judged.after(policy.criterion, evaluation)
    best, waited = judged.best, judged.waited
    if policy.patience <= 0 or waited < policy.patience:
        return None
    count = counted(waited, "evaluation")
    if best is None:
        return f"{metric} had no finite value in {count}"
    return f"{metric} has not improved for {count} since {best.value:.6g} in round {best.round}"


def _in_order(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    return sorted(evaluations, key=lambda evaluation: evaluation[0])
