"""The search for a method's setting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest

from fl_ops.compare.cells import Choice
from fl_ops.compare.table import MethodSection, TuningSection
from fl_ops.compare.tuning import Trial, at_edge, score, search, usual_trials
from tests.fl_ops.compare.conftest import Reached, Read
from tests.fl_server.criteria import BY_ACCURACY

Scores = Callable[[Trial], float]


class Parts(NamedTuple):
    """A method and the table's section [tuning]."""

    method: MethodSection
    tuning: TuningSection


def found(parts: Parts, scores: Scores) -> tuple[Choice, list[Trial]]:
    """(choice, runs in the order in which they were asked for) of a search whose runs have these scores."""
    going = search(*parts)
    asked, trials = next(going), list[Trial]()
    while True:
        assert all(trial not in trials for trial in asked)
        trials += asked
        try:
            asked = going.send([scores(trial) for trial in asked])
        except StopIteration as ended:
            return ended.value, trials


def by_rate(short: dict[float, float], long: dict[float, float] | None = None) -> Scores:
    """Scores by rate in short and long runs. A rate that is not listed diverges in short runs."""

    def of(trial: Trial) -> float:
        known = short if trial.stage == "tuning" else long or {}
        return known.get(trial.choice.learning_rate, -math.inf)

    return of


def by_distance(best: float) -> Scores:
    """Scores that fall with the distance of a rate to this one."""
    return lambda trial: -abs(trial.choice.learning_rate - best)


def rates(trials: list[Trial], stage: str = "tuning") -> list[float]:
    """The rates of these runs."""
    return [trial.choice.learning_rate for trial in trials if trial.stage == stage]


@pytest.fixture
def cm(read: Read) -> Parts:
    """FedCM with two alphas and three rates, 0.1, 0.2, 0.4, without extension and judgement."""
    spec = read().spec
    assert spec.tuning is not None
    return Parts(spec.methods[1], spec.tuning)


@pytest.fixture
def avg(cm: Parts, read: Read) -> Parts:
    """FedAvg: three rates, at most two extensions at each edge, settings within 0.01 judged under two seeds."""
    changes = {"extend": 2, "judge_seeds": [7, 8], "near": 0.01}
    return Parts(read().spec.methods[0], cm.tuning.model_copy(update=changes))


def alpha(trial: Trial) -> float:
    """The own parameter of FedCM."""
    return float(trial.choice.parameters["alpha"])


def test_a_grid_tries_everything_and_takes_the_best(cm: Parts) -> None:
    """Six choices; the best one is at the second alpha and the highest rate."""
    chosen, trials = found(cm, lambda trial: trial.choice.learning_rate * alpha(trial))
    assert (chosen, len(trials)) == (Choice(0.4, {"alpha": 0.3}), 6)
    assert {(trial.stage, trial.seed) for trial in trials} == {("tuning", 9)}


def test_of_equal_scores_the_first_wins(cm: Parts) -> None:
    """The table's order decides, so a search repeats."""
    assert found(cm, lambda trial: 1.0)[0] == Choice(0.1, {"alpha": 0.1})


@pytest.mark.parametrize(("better", "tries"), [(0.1, 4), (0.3, 6)])
def test_a_narrow_search_tries_the_rates_again_only_for_another_variant(cm: Parts, better: float, tries: int) -> None:
    """Three rates, one more variant at the best of them; if that wins, its two other rates as well."""
    narrow = Parts(cm.method, cm.tuning.model_copy(update={"search": "narrow"}))
    chosen, trials = found(narrow, lambda trial: -abs(trial.choice.learning_rate - 0.2) - abs(alpha(trial) - better))
    assert (chosen, len(trials)) == (Choice(0.2, {"alpha": better}), tries)
    assert usual_trials(*narrow) == 6


def test_a_method_has_its_own_rates(cm: Parts) -> None:
    """They replace the table's rates for this method."""
    own = Parts(cm.method.model_copy(update={"learning_rates": [0.01, 0.02]}), cm.tuning)
    assert rates(found(own, lambda trial: 1.0)[1]) == [0.01, 0.02] * 2


def test_clipping_is_searched_beside_the_parameters(cm: Parts) -> None:
    """Two values of clipping with three rates: six runs, of which the clipped one at 0.2 is best."""
    method = cm.method.model_copy(update={"tune": {"max_gradient_norm": [0.0, 1.0]}})
    best = Choice(0.2, {}, {"max_gradient_norm": 1.0})
    chosen, trials = found(Parts(method, cm.tuning), lambda trial: float(trial.choice == best))
    assert (chosen, len(trials)) == (best, 6)


@pytest.mark.parametrize(
    ("scores", "tried", "chosen", "edge"),
    [
        ({0.1: 0.6, 0.2: 0.5, 0.05: 0.7, 0.025: 0.6}, [0.1, 0.2, 0.4, 0.05, 0.025], 0.05, False),
        ({0.1: 0.5, 0.2: 0.6, 0.4: 0.7, 0.8: 0.6}, [0.1, 0.2, 0.4, 0.8], 0.4, False),
        ({0.4: 0.5, 0.8: 0.6, 1.6: 0.7, 3.2: 0.8}, [0.1, 0.2, 0.4, 0.8, 1.6], 1.6, True),
        ({}, [0.1, 0.2, 0.4, 0.05, 0.025], 0.025, True),
    ],
)
def test_a_grid_is_extended_beyond_an_edge_that_wins(
    avg: Parts, scores: dict[float, float], tried: list[float], chosen: float, edge: bool
) -> None:
    """By the ratio 2 of the grid, until the winner is inside or two rates were added; downwards if all diverge."""
    parts = Parts(avg.method, avg.tuning.model_copy(update={"judge_seeds": []}))
    choice, trials = found(parts, by_rate(scores))
    assert (rates(trials), choice.learning_rate) == (tried, chosen)
    assert at_edge(choice, [trial.choice for trial in trials], avg.tuning.learning_rates) == edge


@pytest.fixture
def climbing(cm: Parts) -> Parts:
    """FedCM with two alphas, clipping or none, three rates, and nine cells."""
    method = cm.method.model_copy(update={"tune": {"alpha": [0.1, 0.3], "max_gradient_norm": [0.0, 1.0]}})
    return Parts(method, cm.tuning.model_copy(update={"search": "climb", "cells": 9, "extend": 2}))


def test_a_climb_goes_to_the_neighbours_of_the_best_until_its_cells_have_run(climbing: Parts) -> None:
    """Rates 0.1, 0.2, 0.4; beside 0.4: 0.8, the other alpha and the clipping; beside the best of these: the rest."""

    def value(trial: Trial) -> float:
        return trial.choice.learning_rate + 10 * (alpha(trial) == 0.3)

    chosen, trials = found(climbing, value)
    each = [(trial.choice.learning_rate, alpha(trial), trial.choice.local["max_gradient_norm"]) for trial in trials]
    assert each == [
        (0.1, 0.1, 0.0), (0.2, 0.1, 0.0), (0.4, 0.1, 0.0),
        (0.8, 0.1, 0.0), (0.4, 0.1, 1.0), (0.4, 0.3, 0.0),
        (0.2, 0.3, 0.0), (0.8, 0.3, 0.0), (0.4, 0.3, 1.0),
    ]  # fmt: skip
    assert (chosen.learning_rate, alpha(trials[-2])) == (0.8, 0.3)
    assert at_edge(chosen, [trial.choice for trial in trials], climbing.tuning.learning_rates)


@pytest.mark.parametrize("cells", [1, 2, 4, 12, 15])
def test_every_method_gets_as_many_cells_as_the_table_says(climbing: Parts, cells: int) -> None:
    """With an own parameter and clipping, and with clipping alone, whatever is best; usual_trials knows it."""
    for tune in (climbing.method.tune, {"max_gradient_norm": [0.0, 1.0]}):
        parts = Parts(
            climbing.method.model_copy(update={"tune": tune}),
            climbing.tuning.model_copy(update={"cells": cells, "extend": 3}),
        )
        for best in (0.1, 0.2, 0.4):
            _, trials = found(parts, by_distance(best))
            assert len(trials) == cells == usual_trials(*parts)


def test_a_climb_ends_when_all_is_tried(cm: Parts) -> None:
    """Three rates of two alphas, and no extension: six cells, although nine are allowed."""
    parts = Parts(cm.method, cm.tuning.model_copy(update={"search": "climb", "cells": 9, "extend": 0}))
    assert len(found(parts, lambda trial: 1.0)[1]) == 6


def test_only_the_best_is_judged_if_no_other_is_near(avg: Parts) -> None:
    """0.2 leads by more than 0.01: it runs under both seeds, and no other setting does."""
    chosen, trials = found(avg, by_rate({0.1: 0.5, 0.2: 0.6}, {0.2: 0.7}))
    judged = [(trial.choice.learning_rate, trial.seed) for trial in trials if trial.stage == "judging"]
    assert (chosen.learning_rate, judged) == (0.2, [(0.2, 7), (0.2, 8)])


def test_near_settings_are_judged_by_long_runs_under_several_seeds(avg: Parts) -> None:
    """0.1 is 0.005 behind in the short runs and better in the long ones; 0.4 is 0.05 behind and not judged."""
    chosen, trials = found(avg, by_rate({0.1: 0.595, 0.2: 0.6, 0.4: 0.55, 0.05: 0.3}, {0.1: 0.8, 0.2: 0.7}))
    assert chosen.learning_rate == 0.1
    assert set(rates(trials, "judging")) == {0.1, 0.2}


def test_a_setting_that_diverges_under_one_seed_of_the_judgement_loses(avg: Parts) -> None:
    """0.2 diverges under seed 8. The next best setting, 0.1, is judged in its place and chosen."""

    def scores(trial: Trial) -> float:
        if trial.stage == "judging" and (trial.choice.learning_rate, trial.seed) == (0.2, 8):
            return -math.inf
        return {0.1: 0.5, 0.2: 0.6, 0.4: 0.3, 0.05: 0.2}[trial.choice.learning_rate] + 0.1 * (trial.stage == "judging")

    chosen, trials = found(avg, scores)
    assert (chosen.learning_rate, rates(trials, "judging")) == (0.1, [0.2, 0.2, 0.1, 0.1])


def test_a_setting_that_collapses_in_its_long_runs_loses(avg: Parts) -> None:
    """With finite values, too: 0.2 falls to 0.1, below the short run of 0.1, which is then judged."""
    chosen, _ = found(avg, by_rate({0.1: 0.5, 0.2: 0.6, 0.05: 0.2}, {0.2: 0.1, 0.1: 0.55}))
    assert chosen.learning_rate == 0.1


def test_a_judged_edge_is_extended_and_the_new_rate_is_judged_if_it_is_near(avg: Parts) -> None:
    """0.1 wins after 0.2 failed; 0.05 is near it in the short run and better in the long ones; 0.025 is not near."""
    short = {0.1: 0.5, 0.2: 0.6, 0.05: 0.495, 0.025: 0.4}
    chosen, trials = found(avg, by_rate(short, {0.1: 0.6, 0.05: 0.65}))
    assert (chosen.learning_rate, rates(trials)) == (0.05, [0.1, 0.2, 0.4, 0.05, 0.025])


def test_if_all_diverge_in_the_judgement_lower_rates_are_tried_and_the_lowest_is_chosen(avg: Parts) -> None:
    """Every finite setting was judged; the search ends at its bound."""
    chosen, trials = found(avg, by_rate({0.1: 0.5, 0.2: 0.6, 0.4: 0.4, 0.05: 0.3, 0.025: 0.2}))
    assert (chosen.learning_rate, set(rates(trials, "judging"))) == (0.025, {0.1, 0.2, 0.4, 0.05, 0.025})


def test_the_score_is_the_mean_of_the_last_evaluations(reached: Reached) -> None:
    """Of 0.1, 0.4 and 0.6 the last two make 0.5."""
    assert score(reached(0.1, 0.4, 0.6), last=2, criterion=BY_ACCURACY) == pytest.approx(0.5)


def test_a_run_that_diverged_is_never_chosen(reached: Reached) -> None:
    """Whatever it reached before."""
    assert score(reached(0.9, 0.9, diverged=2), last=2, criterion=BY_ACCURACY) == -math.inf
