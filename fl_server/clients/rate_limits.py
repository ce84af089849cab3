"""Rate limits: a token bucket, a rate for each client, and reserved time slots for registrations.

None of them has a clock: `now` is an argument, in seconds of a monotonic clock.
"""

from __future__ import annotations

BURST_S = 2.0
"""Registrations of this many seconds may come at once."""
KEPT_S = 60.0
"""A reserved slot expires after this many seconds; the client then gets a new one."""


class TokenBucket:
    """Holds up to `capacity` tokens, starts full, and gains `per_s` tokens a second."""

    __slots__ = ("_level", "_updated", "capacity", "per_s")

    def __init__(self, capacity: float, per_s: float) -> None:
        self.capacity = capacity
        self.per_s = per_s
        self._level = capacity
        self._updated = float("-inf")

    def take(self, amount: float, now: float) -> float:
        """Take tokens and return 0; or take none and return the seconds until there are enough.

        An amount above the capacity needs a full bucket, and makes its level negative.
        """
        self._refill(now)
        needed = min(amount, self.capacity)
        if self._level >= needed:
            self._level -= amount
            return 0.0
        return (needed - self._level) / self.per_s

    def spend(self, amount: float, now: float) -> float:
        """Take tokens even if there are too few. Returns the seconds until the level is 0 or more."""
        self._refill(now)
        self._level -= amount
        return max(0.0, -self._level / self.per_s)

    def fill(self) -> None:
        """Fill the bucket."""
        self._level = self.capacity

    def _refill(self, now: float) -> None:
        if now > self._updated:
            if self._level < self.capacity:
                self._level = min(self.capacity, self._level + (now - self._updated) * self.per_s)
            self._updated = now


class ClientRate:
    """The same rate limit for every client, each with its own token bucket."""

    def __init__(self, per_min: float) -> None:
        """per_min: events a minute, and the size of a burst, which is at least 1."""
        self._per_s = per_min / 60.0
        self._burst = max(1.0, per_min)
        self._buckets: dict[str, TokenBucket] = {}

    def wait(self, client: str, now: float) -> float:
        """Seconds until the client may cause another event; 0: it may now, and the event is counted."""
        bucket = self._buckets.get(client)
        if bucket is None:
            bucket = self._buckets[client] = TokenBucket(self._burst, self._per_s)
        return bucket.take(1.0, now)

    def forget(self, client: str) -> None:
        """Drop the client's bucket."""
        self._buckets.pop(client, None)


class RegistrationLimiter:
    """Limits the rate of registrations by reserved time slots.

    A client that comes when too many have come gets a slot, and is let in at that time. A fleet that fits into
    `BURST_S` is never delayed.
    """

    def __init__(self, per_s: float) -> None:
        """per_s: registrations a second."""
        self._interval_s = 1.0 / per_s
        self._next = float("-inf")
        """The next free slot."""
        self._slots: dict[str, float] = {}
        """Reserved slots by client, in the order of time."""

    def wait(self, client_id: str, now: float) -> float:
        """Seconds until the client's slot; 0: it may register now."""
        slot = self._slots.get(client_id)
        if slot is not None and slot > now:
            return slot - now
        if slot is not None:
            del self._slots[client_id]
            if now < slot + KEPT_S:
                return 0.0
        return self._reserve(client_id, now)

    def _reserve(self, client_id: str, now: float) -> float:
        self._expire(now - KEPT_S)
        self._next = max(self._next, now - BURST_S) + self._interval_s
        if self._next <= now:
            return 0.0
        self._slots[client_id] = self._next
        return self._next - now

    def _expire(self, before: float) -> None:
        """Drop slots that were not used in time."""
        while self._slots and (first := next(iter(self._slots.items())))[1] < before:
            del self._slots[first[0]]
