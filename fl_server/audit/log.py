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
from typing import Generic, TypeVar

from prometheus_client import Counter

from fl_common.logs import RepeatLimiter
from fl_server.audit.writer import AuditRecord, AuditWriter
from fl_server.store.ledger import Ledger
from fl_server.store.records import HistoryRecord
from fl_server.timeouts import TimeLimit

Row = TypeVar("Row", AuditRecord, HistoryRecord)

WINDOW_S = 60.0
ANSWER_S = 5.0
"""An answer waits this long for the row of its result."""
READS, REFUSALS = 60, 100
"""Rows a minute: of one operator's reads, and of all refusals."""


class RowLimit(Generic[Row]):
    """Passes a number of rows a minute for each key; one more row counts the others. Lives on the event loop."""

    def __init__(self, per_minute: int, write: Callable[[Row], None], keys: int = 4096) -> None:
        """per_minute: 0 for no limit. write: called with each row that counts others. keys: most at a time."""
        self._limiter: RepeatLimiter[Hashable, Row] = RepeatLimiter(per_minute, WINDOW_S, keys)
        self._write: Callable[[Row], None] = write
        self._timer: asyncio.TimerHandle | None = None

    def passes(self, key: Hashable, row: Row) -> bool:
        """Whether the row is to be written now; else it is counted."""
        now = time.monotonic()
        self._end_windows(now)
        if self._limiter.allow(key, row, now):
            return True
        if self._timer is None:
            left = self._limiter.next_end(now) or 0.0
            self._timer = asyncio.get_running_loop().call_later(left + 0.02, self._window_ended)
        return False

    def forget(self, key: Hashable) -> None:
        """Drop what was counted for a key."""
        self._limiter.forget(key)

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
        self._reads_of_actor = RowLimit(READS, later)
        self._reads = RowLimit(1, self._add_read)
        self._refusals = RowLimit(REFUSALS if refusals_per_minute else 0, later)
        self._refusals_of_caller = RowLimit(refusals_per_minute, self._add_refusal)

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
        if self._reads.passes((record.actor, _host(record), record.method, record.subject, record.result), record):
            self._add_read(record)

    def record_refusal(self, record: AuditRecord) -> None:
        """Add a row for something that a stranger can cause, without waiting; limited by address and minute."""
        if self._refusals_of_caller.passes((_host(record), record.actor), record):
            self._add_refusal(record)

    def _add_read(self, record: AuditRecord) -> None:
        if self._reads_of_actor.passes((record.actor, _host(record)), record):
            self._writer.add_later(record)

    def _add_refusal(self, record: AuditRecord) -> None:
        if self._refusals.passes("", record):
            self._writer.add_later(record)

    async def close(self) -> None:
        """Write the counts of the last minute, and what waits."""
        for limit in (self._reads, self._reads_of_actor, self._refusals_of_caller, self._refusals):
            limit.close()
        await self._writer.close()


def _host(row: AuditRecord) -> str:
    """The address without the port, which differs for each connection."""
    return row.address.rpartition(":")[0] or row.address
