"""Limits on what one client may use: calls at once, calls a second, repeated fetches, and bytes a second.

A call over a limit is refused with a time after which to try again. The refusal itself is delayed: otherwise a client
that calls again at once would cost as much as one that is served. Only a limited number of calls is delayed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import structlog

from fl_common.rate_limits import TokenBucket
from fl_server.errors import LimitExceeded
from fl_server.metrics import Metrics
from fl_server.settings.sections import TransfersConfig

log = structlog.get_logger()

Kind = Literal["uploads", "downloads", "queries", "attends"]
"""Kinds of calls. Each has its own limit of calls at once."""

BUSY_WAIT_S = 1.0
"""Wait after too many calls at once: it is not known when one of them ends."""
REFUSAL_DELAY_S = 1.0
"""A refusal is sent after this many seconds."""
_MOST_DELAYED = 256
"""Refusals of one client that are delayed at a time; further ones are sent at once."""
_SMALLEST_FETCH = 1 << 20
"""Bytes. A smaller resource counts as this many bytes: its cost is the call, which has its own limit."""
_MOST_RESOURCES = 64
"""Resources for which one client's fetches are counted; the one fetched longest ago is dropped first."""
_MOST_ASSIGNMENTS = 64
"""Assignments that are remembered for each client: sending one of them again grants no new burst."""
_DISK_THREADS = 2
"""Threads of a pool that one client's work may use at a time."""
_LOG_S = 60.0
"""Least time between two log lines about one client."""


@dataclass(frozen=True, slots=True)
class Excess:
    """A limit that a call exceeds."""

    limit: str
    """Its name in metrics: a Kind, "calls", "fetches" or "kept"."""
    expected: str
    """What is allowed, in words."""
    wait_s: float
    """The call may succeed after this many seconds."""


class Allowance:
    """Counts one client's calls, fetches and bytes against the limits. Without a clock: `now` is monotonic seconds."""

    def __init__(self, limits: TransfersConfig) -> None:
        self._limits = limits
        self._open: Counter[Kind] = Counter()
        self._calls = TokenBucket(limits.calls, limits.calls_per_s)
        self._bytes = TokenBucket(limits.bytes_per_s, limits.bytes_per_s) if limits.bytes_per_s else None
        self._fetches: OrderedDict[bytes, TokenBucket] = OrderedDict()
        self._assignments: deque[object] = deque(maxlen=_MOST_ASSIGNMENTS)

    def begin(self, kind: Kind, now: float) -> Excess | None:
        """Begin a call, unless it exceeds a limit. Every call that has begun must `end`."""
        most = int(getattr(self._limits, f"{kind}_at_once"))
        if self._open[kind] >= most:
            return Excess(kind, f"{most} {kind} at once (transfers.{kind}_at_once)", BUSY_WAIT_S)
        if wait_s := self._calls.take(1, now):
            rate = f"{self._limits.calls_per_s:g} calls a second (transfers.calls_per_s)"
            return Excess("calls", rate, max(BUSY_WAIT_S, wait_s))
        self._open[kind] += 1
        return None

    def end(self, kind: Kind) -> None:
        """End a call."""
        self._open[kind] -= 1

    def assigned(self, assignment: object) -> None:
        """The client was sent an assignment. A new one grants the calls and fetches that it needs."""
        if assignment not in self._assignments:
            self._assignments.append(assignment)
            self._calls.fill()
            self._fetches.clear()

    def fetch(self, digest: bytes, size: int) -> Fetch:
        """Begin a fetch of a resource of `size` bytes."""
        bucket = self._fetches.get(digest)
        if bucket is None:
            unit = max(size, _SMALLEST_FETCH)
            bucket = TokenBucket(unit * self._limits.fetches, unit / self._limits.fetch_again_s)
            self._fetches[digest] = bucket
        self._fetches.move_to_end(digest)
        if len(self._fetches) > _MOST_RESOURCES:
            self._fetches.popitem(last=False)
        return Fetch(bucket, self._limits)

    def pause_s(self, count: int, now: float) -> float:
        """Count transferred bytes. Returns the seconds to wait before the next ones."""
        return 0.0 if self._bytes is None else self._bytes.spend(count, now)

    @property
    def in_use(self) -> bool:
        """Whether a call of the client is open."""
        return self._open.total() > 0


class Fetch:
    """One download of a resource. Its bytes count against the limit of repeated fetches."""

    def __init__(self, bucket: TokenBucket, limits: TransfersConfig) -> None:
        self._bucket = bucket
        self._limits = limits

    def send(self, count: int, now: float) -> Excess | None:
        """Count bytes that are about to be sent."""
        wait_s = self._bucket.take(count, now)
        if not wait_s:
            return None
        most = f"{self._limits.fetches} fetches of a resource for one assignment (transfers.fetches)"
        return Excess("fetches", most, max(wait_s, self._limits.fetch_again_s))


class ClientLimits:
    """One client's allowance, and its share of the threads. Lives on the event loop."""

    def __init__(self, limits: TransfersConfig) -> None:
        self.allowance = Allowance(limits)
        self.share = asyncio.Semaphore(_DISK_THREADS)
        """Held for work that needs a thread."""
        self.delayed = 0
        """Refusals that are delayed now."""
        self.refused = 0
        """Refused calls since the last log line."""
        self.logged_at = float("-inf")

    async def pace(self, count: int) -> None:
        """Count transferred bytes, and wait until the next ones may be transferred."""
        if pause_s := self.allowance.pause_s(count, time.monotonic()):
            await asyncio.sleep(pause_s)


class TransferLimits:
    """The limits of all clients, by client id; before a call names its session, by certificate or connection."""

    def __init__(self, limits: TransfersConfig, metrics: Metrics, most: int) -> None:
        """most: clients that are remembered. Above that, clients without an open call are dropped."""
        self._limits = limits
        self._metrics = metrics
        self._most = most
        self._clients: OrderedDict[str, ClientLimits] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def of(self, client: str) -> ClientLimits:
        """One client's limits."""
        limits = self._clients.get(client)
        if limits is None:
            limits = self._clients[client] = ClientLimits(self._limits)
            self._drop_idle()
        self._clients.move_to_end(client)
        return limits

    def assigned(self, client: str, assignment: object) -> None:
        """The client was sent an assignment."""
        self.of(client).allowance.assigned(assignment)

    @asynccontextmanager
    async def call(self, client: str, kind: Kind) -> AsyncIterator[ClientLimits]:
        """A call of the client, open as long as the block. Raises LimitExceeded."""
        limits = self.of(client)
        if excess := limits.allowance.begin(kind, time.monotonic()):
            await self._delay(limits)
            raise self.exceeded(client, excess)
        open_calls = self._metrics.transfer_calls.labels(kind)
        open_calls.inc()
        try:
            yield limits
        finally:
            open_calls.dec()
            limits.allowance.end(kind)

    def exceeded(self, client: str, excess: Excess) -> LimitExceeded:
        """Count and log a call over a limit. Returns the error to raise."""
        self._metrics.transfer_limits.labels(excess.limit).inc()
        limits, now = self.of(client), time.monotonic()
        limits.refused += 1
        if now >= limits.logged_at + _LOG_S:
            log.warning("client_limited", client=client, limit=excess.limit, calls=limits.refused, most=excess.expected)
            limits.refused, limits.logged_at = 0, now
        return LimitExceeded(excess.expected, excess.wait_s)

    async def _delay(self, limits: ClientLimits) -> None:
        if limits.delayed >= _MOST_DELAYED:
            return
        limits.delayed += 1
        try:
            await asyncio.sleep(REFUSAL_DELAY_S)
        finally:
            limits.delayed -= 1

    def _drop_idle(self) -> None:
        """Drop the clients that called longest ago while there are too many; a client with an open call is kept."""
        for _ in range(len(self._clients) - self._most):
            client = next(iter(self._clients))
            if self._clients[client].allowance.in_use or self._clients[client].delayed:
                self._clients.move_to_end(client)
            else:
                del self._clients[client]
