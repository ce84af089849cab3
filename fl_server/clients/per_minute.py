"""How often each client may cause something: so many times a minute, and as many at once.

There is no clock here: time is an argument, in seconds of any clock that does not jump.
"""

from __future__ import annotations


class PerMinute:
    """What is left to each client. Only clients that used some of it lately are remembered."""

    def __init__(self, per_min: float) -> None:
        """per_min: times a minute, and at once; once at least."""
        self._per_s = per_min / 60.0
        self._most = max(1.0, per_min)
        self._left: dict[str, tuple[float, float]] = {}
        """By client: how much was left, and when."""

    def wait(self, client: str, now: float) -> float:
        """Seconds until the client has one more time; 0: it has it now, and it is used up."""
        left = self._at(client, now)
        if left < 1.0:
            return (1.0 - left) / self._per_s
        self._left[client] = (left - 1.0, now)
        return 0.0

    def forget(self, client: str) -> None:
        """Nothing is known of the client any more."""
        self._left.pop(client, None)

    def _at(self, client: str, now: float) -> float:
        left, since = self._left.get(client, (self._most, now))
        return min(self._most, left + (now - since) * self._per_s)
