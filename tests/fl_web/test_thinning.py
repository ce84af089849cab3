"""Fewer points of a curve."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_web.charts import thinned


def test_a_short_curve_is_kept_whole() -> None:
    """Nothing is left out if it fits."""
    assert thinned([0, 1, 2], [5, 6, 7], 3) == [0, 1, 2]


@given(st.integers(min_value=3, max_value=400), st.integers(min_value=3, max_value=60))
def test_both_ends_are_kept_and_the_order(count: int, most: int) -> None:
    """As many points as asked for, rising, with the first and the last."""
    kept = thinned([float(i) for i in range(count)], [math.sin(i) for i in range(count)], most)
    assert len(kept) == min(count, most)
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (0, count - 1)


def test_a_single_peak_is_kept() -> None:
    """The point that would be missed most: one round of 10,000 in which the accuracy fell."""
    ys = [0.9] * 10_000
    ys[6543] = 0.1
    kept = thinned([float(i) for i in range(10_000)], ys, 2000)
    assert 6543 in kept
    assert len(kept) == 2000


def test_a_value_that_is_not_finite_is_no_error() -> None:
    """A run may diverge; its curve is still drawn."""
    ys = [math.nan if i % 7 == 0 else math.inf if i % 5 == 0 else float(i) for i in range(100)]
    assert len(thinned([float(i) for i in range(100)], ys, 10)) == 10


def test_the_triangles_are_those_of_the_paper() -> None:
    """By hand: of indices 1 to 3, between (0, 0) and the last point (4, 0), the one farthest from the line is kept."""
    assert thinned([0, 1, 2, 3, 4], [0, 1, -3, 2, 0], 3) == [0, 2, 4]


def test_fewer_than_three_points_are_refused() -> None:
    """Both ends and one between are the least."""
    with pytest.raises(ValueError, match="at least 3"):
        thinned([0, 1], [0, 1], 2)
