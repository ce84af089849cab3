"""Quantiles of the observations between two readings of a histogram."""

from __future__ import annotations

import math

import pytest

from benchmarks.scrape import quantile

BEFORE = {0.01: 5.0, 0.1: 5.0, 1.0: 5.0, math.inf: 5.0}


def test_observations_are_spread_evenly_over_their_bucket() -> None:
    """Of 100 new ones 90 are under 0.01 and 98 under 0.1: the 94th is half way between these two."""
    after = {0.01: 95.0, 0.1: 103.0, 1.0: 105.0, math.inf: 105.0}
    found = quantile(BEFORE, after, 0.94)
    assert found.value == pytest.approx(0.055)
    assert found.bound == 0.1


def test_earlier_observations_do_not_count() -> None:
    """Five earlier ones are in the lowest bucket, the new ones are all above 0.1."""
    after = {0.01: 5.0, 0.1: 5.0, 1.0: 7.0, math.inf: 7.0}
    assert quantile(BEFORE, after, 0.5).bound == 1.0


def test_a_quantile_above_the_last_bound() -> None:
    """The value is the last bound, and the bound infinite."""
    assert quantile(BEFORE, {**BEFORE, math.inf: 6.0}, 0.99) == (1.0, math.inf)


def test_nothing_observed_is_an_error() -> None:
    """Not a quantile of 0."""
    with pytest.raises(ValueError, match="there are none"):
        quantile(BEFORE, BEFORE, 0.99)
