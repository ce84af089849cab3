"""How many rows of history one cause may write: repeated calls fill no ledger, and are counted all the same."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from fl_server.clients.token_bucket import TokenBucket

MAX_KEYS = 4096
"""Causes that are remembered; the one that was quiet for longest is forgotten first."""


class HistoryRate:
    """At most `burst` rows at once for each key, and one more every `every_s`."""

    def __init__(self, burst: int, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._every_s, self._clock = burst, every_s, clock
        self._buckets: OrderedDict[object, TokenBucket] = OrderedDict()
        self._folded: dict[object, int] = {}
        """Events since the last row of a key that had none."""

    def take(self, key: object) -> int | None:
        """For an event of the key: how many before it had no row. None: it gets none either, and is counted."""
        bucket = self._buckets.pop(key, None) or TokenBucket(self._burst, 1.0 / self._every_s)
        self._buckets[key] = bucket
        if len(self._buckets) > MAX_KEYS:
            self._folded.pop(self._buckets.popitem(last=False)[0], None)
        if bucket.take(1.0, self._clock()):
            self._folded[key] = self._folded.get(key, 0) + 1
            return None
        return self._folded.pop(key, 0)
