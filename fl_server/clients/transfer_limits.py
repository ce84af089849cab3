"""The clients that call, each held to its own limits. A call that exceeds one is refused with a time to come again.

A refused call is answered after a pause, for a client that calls again at once would cost as much as one that is
served. Only so many calls of a client are held for that.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog

from fl_server.clients.allowance import Allowance, Excess, Kind
from fl_server.config import TransfersConfig
from fl_server.errors import LimitExceeded
from fl_server.metrics import Metrics

log = structlog.get_logger()
T = TypeVar("T")

HOLD_S = 1.0
"""A refused call is answered so late."""
_MOST_HELD = 256
"""Refused calls of one client that are held at a time; more are answered at once."""
_DISK_THREADS = 2
"""Threads of a pool that one client's work may have at a time."""
_LOG_S = 60.0
"""At most one line in so long about one client."""


class Caller:
    """One client: its allowance, and its share of the threads. Lives on the event loop."""

    def __init__(self, limits: TransfersConfig) -> None:
        self.allowance = Allowance(limits)
        self._threads = asyncio.Semaphore(_DISK_THREADS)
        self.held = 0
        self.refused = 0
        """Calls since the last line in the log."""
        self.logged_at = float("-inf")

    async def in_share(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do what takes a thread, once the client's share of them has one free."""
        async with self._threads:
            return await work()

    async def pace(self, count: int) -> None:
        """So many bytes came or went: wait until the next ones may, where their rate is limited."""
        if pause_s := self.allowance.pause_s(count, time.monotonic()):
            await asyncio.sleep(pause_s)


class TransferLimits:
    """All clients that call, by id; before a client has named its session, by certificate or connection."""

    def __init__(self, limits: TransfersConfig, metrics: Metrics, most: int) -> None:
        """most: clients that are remembered; of more, those that have nothing under way are forgotten first."""
        self._limits = limits
        self._metrics = metrics
        self._most = most
        self._callers: OrderedDict[str, Caller] = OrderedDict()

    def __len__(self) -> int:
        return len(self._callers)

    def of(self, client: str) -> Caller:
        """The client's."""
        caller = self._callers.get(client)
        if caller is None:
            caller = self._callers[client] = Caller(self._limits)
            self._forget()
        self._callers.move_to_end(client)
        return caller

    def given(self, client: str, work: object) -> None:
        """The client was given work."""
        self.of(client).allowance.given(work)

    @asynccontextmanager
    async def call(self, client: str, kind: Kind) -> AsyncIterator[Caller]:
        """A call of the client, for as long as the block lasts. Raises LimitExceeded."""
        caller = self.of(client)
        if excess := caller.allowance.begin(kind, time.monotonic()):
            await self._hold(caller)
            raise self.exceeded(client, excess)
        open_now = self._metrics.transfer_calls.labels(kind)
        open_now.inc()
        try:
            yield caller
        finally:
            open_now.dec()
            caller.allowance.end(kind)

    def exceeded(self, client: str, excess: Excess) -> LimitExceeded:
        """Count a call that exceeds a limit; returns what it is refused with."""
        self._metrics.transfer_limits.labels(excess.limit).inc()
        caller, now = self.of(client), time.monotonic()
        caller.refused += 1
        if now >= caller.logged_at + _LOG_S:
            log.warning("client_limited", client=client, limit=excess.limit, calls=caller.refused, most=excess.expected)
            caller.refused, caller.logged_at = 0, now
        return LimitExceeded(excess.expected, excess.wait_s)

    async def _hold(self, caller: Caller) -> None:
        if caller.held >= _MOST_HELD:
            return
        caller.held += 1
        try:
            await asyncio.sleep(HOLD_S)
        finally:
            caller.held -= 1

    def _forget(self) -> None:
        """Forget who called longest ago, while there are too many; who has a call under way is passed over."""
        for _ in range(len(self._callers) - self._most):
            client = next(iter(self._callers))
            if self._callers[client].allowance.under_way or self._callers[client].held:
                self._callers.move_to_end(client)
            else:
                del self._callers[client]
