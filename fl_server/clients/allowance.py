"""What one client has under way and what it has used up: streams, calls, fetches and bytes, held against its limits.

There is no clock here: time is an argument, in seconds of any clock that does not jump.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Literal

from fl_server.clients.token_bucket import TokenBucket
from fl_server.config import TransfersConfig

Kind = Literal["uploads", "downloads", "queries", "attends"]
"""Calls that are counted apart, each with a limit of calls at once."""

BUSY_WAIT_S = 1.0
"""Wait after too many calls at once: when one of them ends is not known."""
_LEAST_UNIT = 1 << 20
"""A fetch of a small resource counts as this many bytes: what it costs is the call, which has its own limit."""
_MOST_RESOURCES = 64
"""Resources whose fetches are counted for one client; the one fetched longest ago is left out first."""
_MOST_WORKS = 64
"""Assignments that are remembered as given: being sent one of them again entitles to nothing."""


@dataclass(frozen=True, slots=True)
class Excess:
    """A limit that a call exceeds."""

    limit: str
    """Its name in metrics: a Kind, "calls", "fetches" or "kept"."""
    expected: str
    """What is allowed, in words."""
    wait_s: float
    """After which the call may succeed."""


class Allowance:
    """Of one client."""

    def __init__(self, limits: TransfersConfig) -> None:
        self._limits = limits
        self._open: Counter[Kind] = Counter()
        self._calls = TokenBucket(limits.calls, limits.calls_per_s)
        self._bytes = TokenBucket(limits.bytes_per_s, limits.bytes_per_s) if limits.bytes_per_s else None
        self._fetches: OrderedDict[bytes, TokenBucket] = OrderedDict()
        self._works: deque[object] = deque(maxlen=_MOST_WORKS)

    def begin(self, kind: Kind, now: float) -> Excess | None:
        """A call begins, unless it exceeds a limit. Each one that has begun must `end`."""
        most = int(getattr(self._limits, f"{kind}_at_once"))
        if self._open[kind] >= most:
            return Excess(kind, f"{most} {kind} at once (transfers.{kind}_at_once)", BUSY_WAIT_S)
        if wait_s := self._calls.take(1, now):
            rate = f"{self._limits.calls_per_s:g} calls a second (transfers.calls_per_s)"
            return Excess("calls", rate, max(BUSY_WAIT_S, wait_s))
        self._open[kind] += 1
        return None

    def end(self, kind: Kind) -> None:
        """A call is over."""
        self._open[kind] -= 1

    def given(self, work: object) -> None:
        """The client was given work. Work that it did not have before entitles it to the calls and fetches it takes."""
        if work not in self._works:
            self._works.append(work)
            self._calls.fill()
            self._fetches.clear()

    def fetch(self, digest: bytes, size: int) -> Fetch:
        """A fetch of a resource of so many bytes."""
        bucket = self._fetches.get(digest)
        if bucket is None:
            unit = max(size, _LEAST_UNIT)
            bucket = TokenBucket(unit * self._limits.fetches, unit / self._limits.fetch_again_s)
            self._fetches[digest] = bucket
        self._fetches.move_to_end(digest)
        if len(self._fetches) > _MOST_RESOURCES:
            self._fetches.popitem(last=False)
        return Fetch(bucket, self._limits)

    def pause_s(self, count: int, now: float) -> float:
        """So many bytes came or went: seconds to wait before the next ones."""
        return 0.0 if self._bytes is None else self._bytes.spend(count, now)

    @property
    def under_way(self) -> bool:
        """Whether a call of the client has not ended."""
        return self._open.total() > 0


class Fetch:
    """One download of a resource, whose bytes are held against the limit of repeated fetches."""

    def __init__(self, bucket: TokenBucket, limits: TransfersConfig) -> None:
        self._bucket = bucket
        self._limits = limits

    def send(self, count: int, now: float) -> Excess | None:
        """So many bytes are to be sent."""
        wait_s = self._bucket.take(count, now)
        if not wait_s:
            return None
        often = f"{self._limits.fetches} fetches of a resource for one assignment (transfers.fetches)"
        return Excess("fetches", often, max(wait_s, self._limits.fetch_again_s))
