"""Which value of a metric is better."""

from __future__ import annotations

import math

import pytest

from fl_server.rounds.metrics import WELL_KNOWN, Criterion, Directions


@pytest.mark.parametrize(
    ("lower", "a", "b", "expected"),
    [
        (False, 0.9, 0.8, True),
        (False, 0.8, 0.9, False),
        (False, 0.9, 0.9, False),
        (True, 0.8, 0.9, True),
        (True, 0.9, 0.8, False),
        (False, 0.0, None, True),
        (True, 9.0, math.nan, True),
        (False, None, None, False),
        (True, math.nan, None, False),
        (True, -math.inf, 1.0, False),
        (False, math.inf, 1.0, False),
    ],
)
def test_better(lower: bool, a: float | None, b: float | None, expected: bool) -> None:
    """The direction decides; any finite value is better than NaN, infinity or none."""
    assert Criterion("any", lower).better(a, b) is expected


@pytest.mark.parametrize(("lower", "reached"), [(True, [False, True, True]), (False, [True, True, False])])
def test_a_target_is_reached_in_the_direction(lower: bool, reached: list[bool]) -> None:
    """0.7, 0.5 and 0.3 against a target of 0.5. NaN reaches none."""
    criterion = Criterion("mae", lower)
    assert [criterion.reaches(value, 0.5) for value in (0.7, 0.5, 0.3)] == reached
    assert not criterion.reaches(math.nan, 0.5)


@pytest.mark.parametrize("metric", ["gloss", "my_error_free_share", "eval_Loss", "mea", "acuracy", "clients_evaluated"])
def test_nothing_is_guessed_from_a_part_of_a_name(metric: str) -> None:
    """A name that nobody declared has no direction."""
    assert Directions().lower_is_better(metric) is None


def test_well_known_names() -> None:
    """Errors go down, shares of right answers go up."""
    assert [WELL_KNOWN[name] for name in ("loss", "mae", "rmse", "perplexity", "accuracy", "f1", "r2")] == [
        True, True, True, True, False, False, False,
    ]  # fmt: skip


def test_a_declaration_goes_before_the_table() -> None:
    """A task whose "error" is better when higher has the last word."""
    assert Directions({"error": False}).lower_is_better("error") is False


@pytest.mark.parametrize(
    ("metric", "lower"),
    [
        ("clients_mae", True),
        ("clients_mae_mean", True),
        ("clients_mae_worst_decile", True),
        ("clients_mae_without_personal_mean", True),
        ("clients_accuracy_mean", False),
        ("clients_accuracy_std", True),
        ("clients_gloss_mean", False),
        ("clients_other_mean", None),
    ],
)
def test_statistics_over_clients_have_the_direction_of_their_metric(metric: str, lower: bool | None) -> None:
    """But a smaller deviation is always better."""
    assert Directions({"gloss": False}).lower_is_better(metric) is lower
