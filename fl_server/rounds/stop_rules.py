"""Stop rules: a metric has reached its target, or has not improved for too many evaluations.

Both use one metric of the evaluations of committed rounds, in the direction of the run's criterion. A value that is
absent, NaN or infinite is no value: it reaches no target and is never better, but the evaluation still counts towards
`patience`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fl_server.rounds.events import Source
from fl_server.rounds.metrics import BY_LOSS, EVALUATED, Criterion, by_clients, of_averaged

Evaluation = tuple[int, Mapping[str, float]]
"""(round, metrics by name)."""


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


_SHOWN = 20


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
    count = "1 evaluation" if waited == 1 else f"{waited} evaluations"
    if best is None:
        return f"{metric} had no finite value in {count}"
    return f"{metric} has not improved for {count} since {best.value:.6g} in round {best.round}"


def _in_order(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    return sorted(evaluations, key=lambda evaluation: evaluation[0])


class CommittedRound(Protocol):
    """The fields of a committed round that are used; the ledger's record and the wire's message have them."""

    @property
    def round(self) -> int: ...  # noqa: D102 - the name says it
    @property
    def metrics(self) -> Mapping[str, float]: ...  # noqa: D102 - the name says it
    @property
    def bytes_down(self) -> int: ...  # noqa: D102 - the name says it
    @property
    def bytes_up(self) -> int: ...  # noqa: D102 - the name says it
    @property
    def seconds(self) -> float: ...  # noqa: D102 - the name says it


@dataclass(frozen=True, slots=True)
class Reached:
    """The first round that reached a target, and the sums up to and with it."""

    round: int
    """0-based: round + 1 rounds were needed."""
    bytes_down: int
    bytes_up: int
    seconds: float
    """Seconds spent in rounds, from the draw of each to its commit."""


def rounds_to_target(criterion: Criterion, target: float, commits: Iterable[CommittedRound]) -> Reached | None:
    """The first round whose metric is at least as good as the target; None if none is. `commits` in order of round.

    Rounds without an evaluation count as cost and cannot reach the target.
    """
    down = up = 0
    seconds = 0.0
    for commit in commits:
        down, up, seconds = down + commit.bytes_down, up + commit.bytes_up, seconds + commit.seconds
        value = commit.metrics.get(criterion.metric)
        if value is not None and criterion.reaches(value, target):
            return Reached(commit.round, down, up, seconds)
    return None
