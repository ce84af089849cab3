"""How often each client may cause something: so many times a minute, and as many at once.

There is no clock here: time is an argument, in seconds of any clock that does not jump.
"""

from __future__ import annotations

from fl_server.clients.token_bucket import TokenBucket


class PerMinute:
    """A token bucket for each client."""

    def __init__(self, per_min: float) -> None:
        """per_min: times a minute, and at once; once at least."""
        self._per_s = per_min / 60.0
        self._most = max(1.0, per_min)
        self._buckets: dict[str, TokenBucket] = {}

    def wait(self, client: str, now: float) -> float:
        """Seconds until the client has one more time; 0: it has it now, and it is used up."""
        bucket = self._buckets.get(client)
        if bucket is None:
            bucket = self._buckets[client] = TokenBucket(self._most, self._per_s)
        return bucket.take(1.0, now)

    def forget(self, client: str) -> None:
        """Nothing is known of the client any more."""
        self._buckets.pop(client, None)
