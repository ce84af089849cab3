"""The over-selection factor: drawn clients for each required update, learned from drop-outs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_server.rounds.sampling import HIGHEST, LOWEST, WEIGHT, adapted, bounds


def after(rounds: int, in_time: int, dropped: int, start: float = 1.3) -> float:
    """The factor after so many equal rounds."""
    factor = start
    for _ in range(rounds):
        factor = adapted(factor, start, in_time, dropped)
    return factor


def test_one_round_by_hand() -> None:
    """Six in time and three not would have needed 9 / 6 = 1.5: 1.3 + 0.2 * (1.5 - 1.3) = 1.34."""
    assert adapted(1.3, 1.3, in_time=6, dropped=3) == pytest.approx(1.34, abs=1e-12)


@pytest.mark.parametrize(("in_time", "dropped", "end"), [(10, 0, LOWEST), (10, 4, 1.4), (1, 9, HIGHEST)])
def test_the_factor_converges_to_what_the_drop_out_needs(in_time: int, dropped: int, end: float) -> None:
    """After n rounds (1 - WEIGHT)^n of the start value remains; the bounds hold for higher and lower drop-out."""
    distance = abs(1.3 - end) * (1 - WEIGHT) ** 30
    assert abs(after(30, in_time, dropped) - end) == pytest.approx(distance, rel=1e-6)


@pytest.mark.parametrize(("start", "expected"), [(1.3, (1.1, 2.0)), (1.0, (1.0, 2.0)), (3.0, (1.1, 3.0))])
def test_a_start_beyond_the_bounds_widens_them(start: float, expected: tuple[float, float]) -> None:
    """A configured factor of 1, or over 2, stays allowed."""
    assert bounds(start) == expected


@given(st.floats(1, 4), st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=20))
def test_the_factor_never_leaves_its_bounds(start: float, rounds: list[tuple[int, int]]) -> None:
    """For any drop-out, in any order."""
    factor, (lowest, highest) = start, bounds(start)
    for in_time, dropped in rounds:
        factor = adapted(factor, start, in_time, dropped)
        assert lowest - 1e-12 <= factor <= highest + 1e-12
