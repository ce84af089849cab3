"""The search for a method's setting."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from fl_ops.compare.cells import Choice
from fl_ops.compare.table import MethodSection, TuningSection
from fl_ops.compare.tuning import most_tried, score, search
from tests.fl_ops.compare.conftest import Reached, Read

Parts = tuple[MethodSection, TuningSection]


def found(
    method: MethodSection, tuning: TuningSection, scores: Callable[[float, float], float]
) -> tuple[Choice, list[Choice]]:
    """(choice, tried choices) of a search with these scores by rate and alpha."""
    going = search(method, tuning)
    asked, tried = next(going), []
    while True:
        tried += [choice for choice in asked if choice not in tried]
        try:
            asked = going.send([scores(choice.learning_rate, choice.parameters["alpha"]) for choice in asked])
        except StopIteration as ended:
            return ended.value, tried


@pytest.fixture
def parts(read: Read) -> Parts:
    """(FedCM with two alphas, the tuning section): three rates."""
    spec = read().spec
    assert spec.tuning is not None
    return spec.methods[1], spec.tuning


def test_a_grid_tries_everything_and_takes_the_best(parts: Parts) -> None:
    """Six choices; the best one is at the second alpha and the highest rate."""
    chosen, tried = found(*parts, lambda rate, alpha: rate * alpha)
    assert (chosen, len(tried)) == (Choice(0.4, {"alpha": 0.3}), 6)


def test_of_equal_scores_the_first_wins(parts: Parts) -> None:
    """The table's order decides, so a search repeats."""
    assert found(*parts, lambda rate, alpha: 1.0)[0] == Choice(0.1, {"alpha": 0.1})


@pytest.mark.parametrize(("better", "tries"), [(0.1, 4), (0.3, 6)])
def test_a_narrow_search_tries_the_rates_again_only_for_another_variant(
    parts: Parts, better: float, tries: int
) -> None:
    """Three rates, one more variant at the best of them; if that wins, its two other rates as well."""
    method, tuning = parts
    narrow = tuning.model_copy(update={"search": "narrow"})
    chosen, tried = found(method, narrow, lambda rate, alpha: -abs(rate - 0.2) - abs(alpha - better))
    assert (chosen, len(tried)) == (Choice(0.2, {"alpha": better}), tries)
    assert most_tried(method, narrow) == 6


def test_the_score_is_the_mean_of_the_last_evaluations(reached: Reached) -> None:
    """Of 0.1, 0.4 and 0.6 the last two make 0.5."""
    assert score(reached(0.1, 0.4, 0.6), last=2) == pytest.approx(0.5)


def test_a_run_that_diverged_is_never_chosen(reached: Reached) -> None:
    """Whatever it reached before."""
    assert score(reached(0.9, 0.9, diverged=2), last=2) == -math.inf
