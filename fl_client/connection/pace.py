"""A rate limit: so many at once, and so many a second in the long run."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Says how long each one has to wait, and counts it."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        """per_s: in the long run. burst: as many may come at once. clock: seconds."""
        self._every, self._burst, self._clock = 1.0 / per_s, burst, clock
        self._due = clock()

    def delay(self) -> float:
        """Seconds to wait before the next one, which is counted by this call."""
        self._due = max(self._due, self._clock())
        wait = self._due - self._clock() - self._every * (self._burst - 1)
        self._due += self._every
        return max(0.0, wait)

    def free(self) -> bool:
        """Whether the next one may come now; it is counted only then."""
        if max(self._due, self._clock()) - self._clock() > self._every * (self._burst - 1):
            return False
        self.delay()
        return True
