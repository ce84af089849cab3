"""A link: bandwidth in each direction, round-trip time and queue, and the accounting of bytes that leave over it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
_RATE = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(_UNITS)})")
_TIME = re.compile(r"(\d+(?:\.\d+)?)ms")


@dataclass(frozen=True, slots=True)
class Link:
    """What one connection gets. Rates in bytes/s, up: to the coordinator."""

    down: float
    up: float
    round_trip_s: float
    buffer_bytes: int = 1 << 18
    """Bytes that wait for the link's bandwidth in each direction, as in a router's queue. A full queue stops the
    sender; nothing is lost."""

    @classmethod
    def parse(cls, text: str) -> Link:
        """From "50MB/s,200ms" or, with another rate up, "50MB/s/10MB/s,200ms". Raises ValueError."""
        rates, _, time = text.partition(",")
        found, trip = [*_RATE.finditer(rates)], _TIME.fullmatch(time)
        if not 1 <= len(found) <= 2 or "/".join(rate[0] for rate in found) != rates or trip is None:
            raise ValueError(
                f'expected a link as "RATE,TIMEms" or "DOWN/UP,TIMEms" with rates in {", ".join(_UNITS)}, got {text!r}'
            )
        down, up = (float(rate[1]) * _UNITS[rate[2]] for rate in (found[0], found[-1]))
        if not min(down, up) > 0:
            raise ValueError(f"expected a rate above 0, got {text!r}")
        return cls(down, up, float(trip[1]) / 1000)


class TokenBucket:
    """When bytes leave over a link of a rate. Tokens are bytes; unused ones are kept up to `burst_bytes`."""

    def __init__(self, rate: float, burst_bytes: int = 0) -> None:
        self._rate, self._burst_s = rate, burst_bytes / rate
        self._busy_until = float("-inf")
        """Time at which the bytes accepted so far have left, if none leave as a burst."""

    def departure(self, count: int, now: float) -> float:
        """Accept `count` bytes at time `now`, in seconds. Returns the time at which the last of them has left."""
        self._busy_until = max(self._busy_until, now - self._burst_s) + count / self._rate
        return max(now, self._busy_until)
