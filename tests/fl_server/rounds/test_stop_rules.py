"""Stop rules: the best round, and the reason of an end."""

from __future__ import annotations

import math

import pytest

from fl_server.rounds.metrics import BY_LOSS, Best, Criterion, Evaluation, StopPolicy, best_round, stop_reason
from tests.fl_server.criteria import BY_ACCURACY


def accuracies(*values: float) -> list[Evaluation]:
    """Evaluations of rounds 0, 1, ... with these accuracies."""
    return [(round, {"accuracy": value}) for round, value in enumerate(values)]


def test_the_best_round_is_the_earliest_of_equals() -> None:
    """Rounds 1 and 3 share the best value: round 1 has it."""
    assert best_round(BY_ACCURACY, accuracies(0.5, 0.9, 0.7, 0.9)) == Best(round=1, value=0.9)


def test_the_best_round_of_a_loss_is_the_lowest() -> None:
    """Rounds may come in any order and with gaps."""
    assert best_round(BY_LOSS, [(8, {"loss": 0.3}), (2, {"loss": 0.2}), (5, {})]) == Best(2, 0.2)


@pytest.mark.parametrize("metrics", [{}, {"accuracy": math.nan}, {"loss": 0.1}])
def test_without_a_value_there_is_no_best_round(metrics: dict[str, float]) -> None:
    """An absent value, NaN, and the value of another metric do not count."""
    assert best_round(BY_ACCURACY, [(0, metrics)]) is None


@pytest.mark.parametrize("value", [0.9, 0.93])
def test_a_target_that_is_reached_ends_the_run(value: float) -> None:
    """A value equal to the target is enough, and the reason names the first such round."""
    evaluations = [(12, {"accuracy": value}), (13, {"accuracy": 0.95}), (11, {"accuracy": 0.89})]
    reason = stop_reason(StopPolicy(BY_ACCURACY, target=0.9), evaluations)
    assert reason == f"accuracy reached {value}, the target is 0.9, in round 12"


def test_a_loss_reaches_its_target_from_above() -> None:
    """0.31 has not reached 0.3; 0.25 has."""
    policy = StopPolicy(BY_LOSS, target=0.3)
    assert stop_reason(policy, [(0, {"loss": 0.31})]) is None
    assert stop_reason(policy, [(0, {"loss": 0.25})]) == "loss reached 0.25, the target is 0.3, in round 0"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_reaches_no_target(value: float) -> None:
    """A diverged model does not complete a run."""
    evaluations: list[Evaluation] = [(0, {"accuracy": value, "loss": value}), (1, {})]
    assert stop_reason(StopPolicy(BY_ACCURACY, target=0.9), evaluations) is None
    assert stop_reason(StopPolicy(BY_LOSS, target=0.9), evaluations) is None


def test_patience_counts_the_evaluations_since_the_best() -> None:
    """Best in round 1; rounds 2 and 3 are no better: a patience of 2 ends the run, one of 3 does not."""
    evaluations = accuracies(0.5, 0.91, 0.7, 0.91)
    assert stop_reason(StopPolicy(BY_ACCURACY, patience=3), evaluations) is None
    reason = stop_reason(StopPolicy(BY_ACCURACY, patience=2), evaluations)
    assert reason == "accuracy has not improved for 2 evaluations since 0.91 in round 1"


def test_the_reason_for_a_patience_of_one_is_in_the_singular() -> None:
    """It has "1 evaluation", not "1 evaluations"."""
    reason = stop_reason(StopPolicy(BY_ACCURACY, patience=1), accuracies(0.5, 0.4))
    assert reason == "accuracy has not improved for 1 evaluation since 0.5 in round 0"


def test_evaluations_without_a_value_use_patience_up() -> None:
    """A metric that is never reported ends a run with patience too, and the reason states it."""
    policy = StopPolicy(Criterion("f1", lower_is_better=False), patience=2)
    assert stop_reason(policy, accuracies(0.5)) is None
    assert stop_reason(policy, accuracies(0.5, 0.6)) == "f1 had no finite value in 2 evaluations"


def test_a_target_is_the_reason_before_patience() -> None:
    """If both end the run, the target is the reason."""
    reason = stop_reason(StopPolicy(BY_ACCURACY, target=0.5, patience=1), accuracies(0.6, 0.5))
    assert reason == "accuracy reached 0.6, the target is 0.5, in round 0"


@pytest.mark.parametrize(
    ("policy", "looks"), [(StopPolicy(), False), (StopPolicy(target=0.0), True), (StopPolicy(patience=1), True)]
)
def test_a_policy_without_target_and_patience_never_stops(policy: StopPolicy, looks: bool) -> None:
    """Evaluations are awaited exactly if one of them can end the run."""
    assert policy.uses_metrics is looks
    assert looks or stop_reason(policy, accuracies(*[0.5] * 50)) is None
