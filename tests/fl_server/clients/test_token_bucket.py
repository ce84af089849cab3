"""Token buckets: a burst, then a rate."""

from __future__ import annotations

import pytest

from fl_server.clients.token_bucket import TokenBucket


def test_a_burst_is_taken_at_once_and_then_so_many_a_second():
    """Who asks for too much is told when there is enough, and takes nothing."""
    bucket = TokenBucket(capacity=3, per_s=2)
    assert [bucket.take(1, now=0) for _ in range(3)] == [0, 0, 0]
    assert bucket.take(1, now=0) == pytest.approx(0.5)
    assert bucket.take(2, now=0.25) == pytest.approx(0.75)
    assert bucket.take(1, now=0.5) == 0


def test_no_more_than_the_capacity_is_gained():
    """However long nothing was taken."""
    bucket = TokenBucket(capacity=2, per_s=100)
    assert [bucket.take(1, now=1e9) for _ in range(3)] == [0, 0, pytest.approx(0.01)]


def test_more_than_the_capacity_is_taken_from_a_full_bucket_only():
    """A single large amount is not refused for ever; it is paid for afterwards."""
    bucket = TokenBucket(capacity=10, per_s=1)
    assert bucket.take(15, now=0) == 0
    assert bucket.take(1, now=0) == pytest.approx(6)


def test_what_is_spent_in_any_case_says_how_long_to_wait():
    """Until the level is not negative any more."""
    bucket = TokenBucket(capacity=100, per_s=100)
    assert bucket.spend(100, now=0) == 0
    assert bucket.spend(50, now=0) == pytest.approx(0.5)
    assert bucket.spend(0, now=0.5) == 0


def test_a_bucket_can_be_filled():
    """All tokens are there again at once."""
    bucket = TokenBucket(capacity=2, per_s=1)
    bucket.take(2, now=0)
    bucket.fill()
    assert bucket.take(2, now=0) == 0


def test_time_that_goes_back_gives_nothing_and_takes_nothing():
    """Two callers may look at the clock in another order."""
    bucket = TokenBucket(capacity=1, per_s=1)
    assert bucket.take(1, now=10) == 0
    assert bucket.take(1, now=9) == pytest.approx(1)
    assert bucket.take(1, now=11) == 0
