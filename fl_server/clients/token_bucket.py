"""A token bucket. There is no clock here: time is an argument, in seconds of any clock that does not jump."""

from __future__ import annotations


class TokenBucket:
    """Holds up to `capacity` tokens, is full at first, and gains `per_s` of them a second."""

    __slots__ = ("_at", "_level", "capacity", "per_s")

    def __init__(self, capacity: float, per_s: float) -> None:
        self.capacity = capacity
        self.per_s = per_s
        self._level = capacity
        self._at = float("-inf")

    def take(self, amount: float, now: float) -> float:
        """Take tokens and return 0; or take none, and return the seconds after which there are enough.

        An amount above the capacity is taken from a full bucket, whose level is negative after that.
        """
        self._gain(now)
        wanted = min(amount, self.capacity)
        if self._level >= wanted:
            self._level -= amount
            return 0.0
        return (wanted - self._level) / self.per_s

    def spend(self, amount: float, now: float) -> float:
        """Take tokens in any case; returns the seconds until the level is not negative, 0 if it is not."""
        self._gain(now)
        self._level -= amount
        return max(0.0, -self._level / self.per_s)

    def fill(self) -> None:
        """All tokens are there again."""
        self._level = self.capacity

    def _gain(self, now: float) -> None:
        if now > self._at:
            if self._level < self.capacity:
                self._level = min(self.capacity, self._level + (now - self._at) * self.per_s)
            self._at = now
