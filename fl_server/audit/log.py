"""The audit log of one coordinator: what each kind of row may cost.

Rows of changes are durable before their callers are answered. Rows of reads and of refusals are limited, because a
monitor that polls or a stranger could fill the ledger: beyond the limit they are counted, and one row has their number.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from prometheus_client import Counter

from fl_common.logs import RepeatLimiter
from fl_server.audit.writer import AuditRecord, AuditWriter
from fl_server.store.ledger import Ledger
from fl_server.timeouts import TimeLimit

WINDOW_S = 60.0
ANSWER_S = 5.0
"""An answer waits this long for the row of its result."""
READS, REFUSALS = 60, 100
"""Rows a minute: of one operator's reads, and of all refusals."""


class RowLimit:
    """Passes a number of rows a minute for each key; one more row counts the others. Lives on the event loop."""

    def __init__(
        self, per_minute: int, key: Callable[[AuditRecord], Hashable], write: Callable[[AuditRecord], None]
    ) -> None:
        """per_minute: 0 for no limit. write: called with each row that is to be written."""
        self._limiter: RepeatLimiter[Hashable, AuditRecord] = RepeatLimiter(per_minute, WINDOW_S)
        self._key, self._write = key, write
        self._timer: asyncio.TimerHandle | None = None

    def add(self, record: AuditRecord) -> None:
        """Write a row now, or count it."""
        now = time.monotonic()
        self._end_windows(now)
        if self._limiter.allow(self._key(record), record, now):
            self._write(record)
        elif self._timer is None:
            left = self._limiter.next_end(now) or 0.0
            self._timer = asyncio.get_running_loop().call_later(left + 0.02, self._window_ended)

    def close(self) -> None:
        """Write the counts of all windows now."""
        if self._timer is not None:
            self._timer.cancel()
        self._end_windows(math.inf)

    def _window_ended(self) -> None:
        self._timer = None
        self._end_windows(time.monotonic())
        left = self._limiter.next_end(time.monotonic())
        if left is not None:
            self._timer = asyncio.get_running_loop().call_later(left + 0.02, self._window_ended)

    def _end_windows(self, now: float) -> None:
        for suppressed in self._limiter.take_ended(now):
            times = "once more" if suppressed.count == 1 else f"{suppressed.count} times more"
            last = f", the last one: {suppressed.last.detail}" if suppressed.last.detail else ""
            self._write(replace(suppressed.last, detail=f"{times} within a minute{last}"))


class AuditLog:
    """Writes audit records to the ledger. Lives on the event loop."""

    def __init__(self, ledger: Ledger, state_dir: Path, refusals_per_minute: int, counter: Counter) -> None:
        """refusals_per_minute: rows for one address; 0 for no limit. counter: see `AuditWriter`."""
        self._writer = AuditWriter(ledger, state_dir, counter)
        later = self._writer.add_later
        self._reads_of_actor = RowLimit(READS, lambda row: (row.actor, _host(row)), later)
        self._reads = RowLimit(
            1, lambda row: (row.actor, _host(row), row.method, row.subject, row.result), self._reads_of_actor.add
        )
        self._refusals = RowLimit(REFUSALS if refusals_per_minute else 0, lambda _: "", later)
        self._refusals_of_caller = RowLimit(
            refusals_per_minute, lambda row: (_host(row), row.actor), self._refusals.add
        )

    async def start(self) -> None:
        """Check the end of the log, before the first row. Raises StoreError."""
        await self._writer.start()

    async def record(self, record: AuditRecord) -> None:
        """Add a row. Returns when it is durable; waits while the ledger cannot be written."""
        await self._writer.add(record)

    async def record_in_time(self, record: AuditRecord) -> None:
        """Add a row, and wait for it for ANSWER_S at most. Then the row is written when the ledger can."""
        with suppress(TimeoutError), TimeLimit(ANSWER_S):
            await self._writer.add(record)

    async def record_now(self, record: AuditRecord) -> int:
        """Add a row before a change, and return its number when it is durable.

        Raises StoreError if it cannot be written: then the change must not be made.
        """
        return await self._writer.add(record, at_once=True)

    def record_later(self, record: AuditRecord) -> None:
        """Add a row without waiting."""
        self._writer.add_later(record)

    def record_read(self, record: AuditRecord) -> None:
        """Add a row for a call that changes nothing, without waiting. Repeats within a minute are one row."""
        self._reads.add(record)

    def record_refusal(self, record: AuditRecord) -> None:
        """Add a row for something that a stranger can cause, without waiting; limited by address and minute."""
        self._refusals_of_caller.add(record)

    async def close(self) -> None:
        """Write the counts of the last minute, and what waits."""
        for limit in (self._reads, self._reads_of_actor, self._refusals_of_caller, self._refusals):
            limit.close()
        await self._writer.close()


def _host(row: AuditRecord) -> str:
    """The address without the port, which differs for each connection."""
    return row.address.rpartition(":")[0] or row.address
