"""The one rate limit of all programs: a token bucket, which allows a burst at once and a fixed rate in the long run.

`TokenBucket` and `TokenBuckets` have no clock: `now` is an argument, in seconds of a monotonic clock.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable


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


class TokenBuckets:
    """A bucket for each key, all with the same rate. A burst is one period of it, and at least one token."""

    def __init__(self, count: float, period_s: float, most: int | None = None) -> None:
        """count: tokens in a period. most: keys that are remembered; the one used least recently makes room."""
        self._capacity, self._per_s, self._most = max(1.0, count), count / period_s, most
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def of(self, key: str) -> TokenBucket:
        """The bucket of a key."""
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(self._capacity, self._per_s)
            if self._most is not None and len(self._buckets) > self._most:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        return bucket

    def forget(self, key: str) -> None:
        """Drop the bucket of a key."""
        self._buckets.pop(key, None)


class RateLimiter:
    """A bucket with a clock, for one kind of action."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        """per_s: actions per second in the long run. burst: actions allowed at once. clock: seconds."""
        self._bucket, self._clock = TokenBucket(burst, per_s), clock

    def delay(self) -> float:
        """Seconds to wait before the next action, which this call counts."""
        return self._bucket.spend(1.0, self._clock())

    def try_acquire(self) -> bool:
        """Whether the next action is allowed now. Only an allowed action is counted."""
        return not self._bucket.take(1.0, self._clock())


_NETWORK_BITS = 64
"""One holder usually has a /64 network of IPv6."""


def network_of(address: str) -> str:
    """What the limits of a caller's address (host:port) count: the address of IPv4, the /64 network of IPv6."""
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _NETWORK_BITS), strict=False))
