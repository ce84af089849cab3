"""Robust centres and selections by hand: a few bad updates cannot move them far."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from algorithms.reducers.robust import (
    contribution_scales,
    median_cut,
    multi_krum,
    squared_distances,
    stacked,
    trimmed_cut,
    trimmed_maximum,
    trimmed_mean,
)

COLUMN = torch.tensor([[9.0], [1.0], [2.0], [-50.0], [4.0]], dtype=torch.float64)


def test_a_trimmed_mean_by_hand() -> None:
    """Of -50, 1, 2, 4, 9: all give -34/5, without the ends (1 + 2 + 4) / 3, without two on each side 2."""
    assert [trimmed_mean(COLUMN, cut).item() for cut in (0, 1, 2)] == [-34 / 5, 7 / 3, 2.0]


def test_a_median_of_an_even_number_is_the_mean_of_the_middle_two() -> None:
    """Of -50, 1, 2, 9: 3/2."""
    assert trimmed_mean(COLUMN[:4], median_cut(4)).item() == 1.5


def test_each_entry_has_its_own_median() -> None:
    """Columns 1, 2, 3 and 30, 10, 20."""
    values = torch.tensor([[1.0, 30.0], [2.0, 10.0], [3.0, 20.0]]).double()
    assert trimmed_mean(values, median_cut(3)).tolist() == [2.0, 20.0]


def test_a_trimmed_maximum_by_hand() -> None:
    """Of -50, 1, 2, 4, 9 in integers: 9, without the ends 4, without two on each side 2."""
    assert [trimmed_maximum(COLUMN.long(), cut).item() for cut in (0, 1, 2)] == [9, 4, 2]


def test_the_maximum_of_switches() -> None:
    """Of three booleans the middle one."""
    assert trimmed_maximum(torch.tensor([[True], [False], [False]]), 1).tolist() == [False]


@pytest.mark.parametrize(("count", "cut"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (10, 4)])
def test_the_cut_of_a_median(count: int, cut: int) -> None:
    """One value is left of an odd number, two of an even."""
    assert median_cut(count) == cut


@pytest.mark.parametrize(
    ("count", "trim", "cut"), [(10, 0.2, 2), (10, 0.21, 3), (100, 0.07, 7), (3, 0.01, 1), (2, 0.4, 0), (5, 0.49, 2)]
)
def test_the_cut_of_a_share(count: int, trim: float, cut: int) -> None:
    """Rounded up, so that of three or more at least one falls away; 0.07 of 100 is 7 and not 8."""
    assert trimmed_cut(count, trim) == cut


@pytest.mark.parametrize("cut", [-1, 3])
def test_something_must_be_left(cut: int) -> None:
    """Three on each side of five are more than there are."""
    with pytest.raises(ValueError, match=f"expected to drop fewer than all 5 values, got {cut} on each side"):
        trimmed_mean(COLUMN, cut)
    with pytest.raises(ValueError, match=f"expected to drop fewer than all 5 values, got {cut} on each side"):
        trimmed_maximum(COLUMN, cut)


def test_contributions_are_in_the_units_of_the_sum() -> None:
    """p = 1/4, 3/4 and c = 1/2, -3: d counts 2 times and -4 times, and sum p v = sum c d."""
    assert contribution_scales((0.5, -3.0), (0.25, 0.75)) == (2.0, -4.0)


def test_distances_by_hand() -> None:
    """(0, 0), (3, 4), (0, 0): 25 apart, or not at all."""
    values = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]).double()
    assert squared_distances(values).tolist() == [[0.0, 25.0, 0.0], [25.0, 0.0, 25.0], [0.0, 25.0, 0.0]]


def krum(values: Sequence[float], byzantine: int, keep: int = 0) -> tuple[int, ...]:
    """Multi-Krum's choice among single numbers."""
    return multi_krum(squared_distances(stacked(torch.tensor([[value]]) for value in values)), byzantine, keep)


def test_a_choice_by_hand() -> None:
    """Of 0, 1, 3, 100, 2 with f = 1 each is scored by its two nearest others.

    Squared: 0 at 1 + 4, 1 at 1 + 1, 3 at 1 + 4, 100 at 97^2 + 98^2, 2 at 1 + 1. The best two are 1 and 2, and a third
    is 0, which is as good as 3 and stands before it.
    """
    values = (0.0, 1.0, 3.0, 100.0, 2.0)
    assert [krum(values, 1, keep) for keep in (1, 2, 3, 4)] == [(1,), (1, 4), (0, 1, 4), (0, 1, 2, 4)]
    assert krum(values, 1) == (1, 4)


def test_equal_updates_are_chosen_by_their_order() -> None:
    """All scores are 0."""
    assert krum((5.0,) * 6, 1) == (0, 1, 2)


@pytest.mark.parametrize(("count", "byzantine", "keep"), [(3, 1, 1), (5, 1, 5)])
def test_a_choice_of_too_few_is_refused(count: int, byzantine: int, keep: int) -> None:
    """Three have no neighbours with f = 1; of five at most four may be kept."""
    with pytest.raises(ValueError, match=f"expected 4 updates or more and at most {count - 1} to keep, got {count}"):
        krum(range(count), byzantine, keep)
