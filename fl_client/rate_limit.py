"""A rate limiter: a burst at once, and a fixed rate in the long run."""

from __future__ import annotations

import time
from collections.abc import Callable


class RateLimiter:
    """Returns how long each action must wait, and counts the action."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        """per_s: actions per second in the long run. burst: actions allowed at once. clock: seconds."""
        self._every, self._burst, self._clock = 1.0 / per_s, burst, clock
        self._due = clock()

    def delay(self) -> float:
        """Seconds to wait before the next action, which this call counts."""
        self._due = max(self._due, self._clock())
        wait = self._due - self._clock() - self._every * (self._burst - 1)
        self._due += self._every
        return max(0.0, wait)

    def try_acquire(self) -> bool:
        """Whether the next action is allowed now. Only an allowed action is counted."""
        if max(self._due, self._clock()) - self._clock() > self._every * (self._burst - 1):
            return False
        self.delay()
        return True
