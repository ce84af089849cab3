"""How many rows of history one cause may write: repeated calls fill no ledger, and are counted all the same."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_KEYS = 4096
"""Causes that are remembered; the one that was quiet for longest is forgotten first."""


@dataclass(slots=True)
class _Bucket:
    rows: float
    """How many may be written now."""
    filled_at: float
    folded: int = 0
    """Events since the last row that had none."""


class HistoryRate:
    """At most `burst` rows at once for each key, and one more every `every_s`."""

    def __init__(self, burst: int, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._every_s, self._clock = burst, every_s, clock
        self._buckets: OrderedDict[object, _Bucket] = OrderedDict()

    def take(self, key: object) -> int | None:
        """For an event of the key: how many before it had no row. None: it gets none either, and is counted."""
        now = self._clock()
        bucket = self._buckets.pop(key, None) or _Bucket(self._burst, now)
        self._buckets[key] = bucket
        if len(self._buckets) > MAX_KEYS:
            self._buckets.popitem(last=False)
        bucket.rows = min(float(self._burst), bucket.rows + (now - bucket.filled_at) / self._every_s)
        bucket.filled_at = now
        if bucket.rows < 1:
            bucket.folded += 1
            return None
        bucket.rows -= 1
        folded, bucket.folded = bucket.folded, 0
        return folded
