"""Token buckets, a bucket for each key, and a bucket with a clock."""

from __future__ import annotations

import pytest

from fl_common.rate_limits import RateLimiter, TokenBucket, TokenBuckets


def test_a_burst_is_taken_at_once_and_then_tokens_come_at_the_rate() -> None:
    """A request for too many tokens takes none, and returns the time until there are enough."""
    bucket = TokenBucket(capacity=3, per_s=2)
    assert [bucket.take(1, now=0) for _ in range(3)] == [0, 0, 0]
    assert bucket.take(1, now=0) == pytest.approx(0.5)
    assert bucket.take(2, now=0.25) == pytest.approx(0.75)
    assert bucket.take(1, now=0.5) == 0


def test_a_bucket_holds_no_more_than_its_capacity() -> None:
    """Regardless of the time without requests."""
    bucket = TokenBucket(capacity=2, per_s=100)
    assert [bucket.take(1, now=1e9) for _ in range(3)] == [0, 0, pytest.approx(0.01)]


def test_more_than_the_capacity_is_taken_from_a_full_bucket_only() -> None:
    """A single large amount is taken eventually; later requests wait for it."""
    bucket = TokenBucket(capacity=10, per_s=1)
    assert bucket.take(15, now=0) == 0
    assert bucket.take(1, now=0) == pytest.approx(6)


def test_spent_tokens_return_the_time_to_wait() -> None:
    """Until the level is 0 or more."""
    bucket = TokenBucket(capacity=100, per_s=100)
    assert bucket.spend(100, now=0) == 0
    assert bucket.spend(50, now=0) == pytest.approx(0.5)
    assert bucket.spend(0, now=0.5) == 0


def test_a_bucket_can_be_filled() -> None:
    """All tokens are available again at once."""
    bucket = TokenBucket(capacity=2, per_s=1)
    bucket.take(2, now=0)
    bucket.fill()
    assert bucket.take(2, now=0) == 0


def test_an_earlier_time_adds_and_removes_nothing() -> None:
    """Two callers may read the clock in the reverse order."""
    bucket = TokenBucket(capacity=1, per_s=1)
    assert bucket.take(1, now=10) == 0
    assert bucket.take(1, now=9) == pytest.approx(1)
    assert bucket.take(1, now=11) == 0


def test_every_key_has_a_bucket_of_its_own() -> None:
    """Six a minute: six at once, then one every ten seconds, and never more than six at once."""
    rate = TokenBuckets(6.0, 60.0)
    assert [rate.of("a").take(1, 0.0) for _ in range(6)] == [0.0] * 6
    assert rate.of("a").take(1, 0.0) == pytest.approx(10.0)
    assert rate.of("b").take(1, 0.0) == 0.0
    assert rate.of("a").take(1, 4.0) == pytest.approx(6.0)
    assert rate.of("a").take(1, 10.0) == 0.0
    assert [rate.of("a").take(1, 1000.0) for _ in range(6)] == [0.0] * 6
    assert rate.of("a").take(1, 1000.0) > 0.0


def test_few_keys_are_remembered() -> None:
    """The one used least recently makes room; it starts with a full bucket when it comes again."""
    rate = TokenBuckets(1.0, 60.0, most=2)
    for key in ("a", "b", "a", "c"):
        rate.of(key).take(1, 0.0)
    assert len(rate) == 2
    assert [rate.of(key).take(1, 0.0) for key in ("a", "b")] == [60.0, 0.0]


def test_a_rate_limiter_allows_a_burst_and_then_its_rate() -> None:
    """Three at once, then one every half second. A long pause allows no more than three at once."""
    now = [100.0]
    limiter = RateLimiter(2.0, 3, lambda: now[0])
    assert [limiter.delay() for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 1.0]
    now[0] += 1000.0
    assert [limiter.try_acquire() for _ in range(5)] == [True, True, True, False, False]
    now[0] += 0.5
    assert [limiter.try_acquire() for _ in range(2)] == [True, False]
