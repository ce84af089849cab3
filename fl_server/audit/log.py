"""The audit log of one coordinator: what each kind of row may cost, and how rows are written.

Rows of changes are durable before their callers are answered. Rows of reads and of refusals are limited, because a
monitor that polls or a stranger could fill the ledger: beyond the limit they are counted, and one row has their number.

Rows are numbered and linked, and several are written in one transaction. The writer remembers the newest row. Rows are
added only behind that row, so a change of the end by somebody else is found with the next row, logged, and recorded as
a row itself. The newest durable row is also in a file of the state directory, which finds rows that were removed from
the end while no coordinator ran.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import structlog
from prometheus_client import Counter

from fl_common.audit import START, AuditRow, Head, limited, missing
from fl_common.files import atomic_writer
from fl_common.logs import RepeatLimiter
from fl_common.units import counted
from fl_common.waiting import shielded
from fl_server.store.errors import StoreFull
from fl_server.store.ledger import RETRY_S, Ledger
from fl_server.store.records import HistoryRecord

log = structlog.get_logger()
HEAD_FILE = "audit.head"
"""The file of the state directory with NUMBER:HASH of the newest durable row."""
ALTERED = "audit_altered"
"""Method of the row that records that the chain's end is not the one that was written."""
HEAD_MISSING = "audit_head_missing"
"""Method of the row that records that the file was not there, or not readable, at a start with rows in the ledger."""
MOST_ROWS = 500
"""Most rows of one transaction: other calls of the ledger need their turn."""
MOST_WAITING = 10_000
"""Rows that wait for the ledger. Further ones that nobody waits for are left out, and counted."""
_LEAST = -(2**63)
CLOSE_S = 1.0
"""A stop waits this long for the last rows."""
WINDOW_S = 60.0
ANSWER_S = 5.0
"""An answer waits this long for the row of its result."""
READS, REFUSALS = 60, 100
"""Rows a minute: of one operator's reads, and of all refusals."""


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """Who did what, from where, to what, with which result. Secrets are never part of it."""

    actor: str
    """"operator:alice", "client:edge-3", "anybody"."""
    address: str
    """host:port of the caller; "" if there was none."""
    method: str
    """The called method, or what happened: "BanClient", "Enroll", "identity_refused"."""
    subject: str
    """The run, client, token or certificate concerned; may be empty."""
    result: str
    """"ok", or the status code in lower case: "permission_denied"; "asked" for the row before a change."""
    detail: str = ""
    """The reason given, or the refusal."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A row that is not written yet."""

    record: AuditRecord
    time_us: int
    written: asyncio.Future[int] | None
    """Its number once it is durable; None if nobody waits."""
    at_once: bool = False
    """Whether a failure of the ledger is passed on; otherwise the row is tried again."""


class AuditWriter:
    """The end of the chain. Lives on the event loop; the ledger's thread writes."""

    def __init__(
        self, ledger: Ledger, state_dir: Path, counter: Counter, clock: Callable[[], float] = time.time
    ) -> None:
        """counter: counts rows that were "written" or "left_out", and ends that were found "altered"."""
        self._ledger, self._head_file, self._counter, self._clock = ledger, state_dir / HEAD_FILE, counter, clock
        self._head: Head | None = None
        """None before the first use."""
        self._waiting: deque[_Waiting] = deque()
        self._unsure: Sequence[tuple[Head, _Waiting]] = ()
        """Rows of the last transaction if it failed. A lost connection leaves its result unknown."""
        self._hurry = asyncio.Event()
        """Set when the next attempt at a full disk is not to wait."""
        self._task: asyncio.Task[None] | None = None

    async def add(self, record: AuditRecord, *, at_once: bool = False) -> int:
        """Add a row and return its number when it is durable. at_once: raises StoreError in place of waiting."""
        written: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue(self._entry(record, written, at_once=at_once))
        if at_once:
            self._hurry.set()
        return await shielded(written)

    def add_later(self, record: AuditRecord) -> None:
        """Add a row that nobody waits for; left out while too many wait."""
        if len(self._waiting) < MOST_WAITING:
            self._queue(self._entry(record, None))
        else:
            self._counter.labels("left_out").inc()

    async def start(self) -> Head:
        """Check the end of the chain against the file of before. Returns the newest row. Raises StoreError."""
        head, problem = await self._ledger.do(self._read_end)
        known = await self._ledger.do(self._known_head)
        self._head = head
        if isinstance(known, str):
            self._report_missing(known, head)
            await self._ledger.do(self._write_head, head)
        if problem:
            self._report(problem)
        log.info("audit_head", head=str(head))
        if self._waiting:
            self._begin()
        return head

    async def close(self) -> None:
        """Write what waits, for a short time."""
        if self._task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._task
        if self._head is not None:
            log.info("audit_head", head=str(self._head), not_written=len(self._waiting))

    def _entry(self, record: AuditRecord, written: asyncio.Future[int] | None, *, at_once: bool = False) -> _Waiting:
        return _Waiting(record, int(self._clock() * 1e6), written, at_once)

    def _queue(self, row: _Waiting) -> None:
        self._waiting.append(row)
        self._begin()

    def _begin(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(MOST_ROWS, len(self._waiting)))]
            try:
                await self._write(batch)
            except StoreFull as error:
                log.warning("audit_not_written", error=str(error), waiting=len(batch) + len(self._waiting))
                self._waiting.extendleft(reversed([row for row in batch if not _failed(row, error)]))
                await self._pause()
            except Exception as error:  # noqa: BLE001 - its callers must not wait for ever
                log.error("audit_not_written", error=str(error), rows=[asdict(row.record) for row in batch])
                for row in batch:
                    _failed(replace(row, at_once=True), error)

    async def _pause(self) -> None:
        self._hurry.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S if self._waiting else 0):
                await self._hurry.wait()

    async def _write(self, batch: Sequence[_Waiting]) -> None:
        after = self._head or await self.start()
        rows = _linked(after, batch)
        durable = any(row.written is not None for row in batch)
        sent = [(row.head, waiting) for row, waiting in zip(rows, batch, strict=True)]
        unsure, self._unsure = self._unsure, sent
        newest = await self._ledger.do(self._add, rows, after, durable)
        self._unsure = ()
        if newest == rows[-1].head:
            self._written(sent)
            return
        # Nothing was added, because another row is the newest. It may be one of the transaction that failed before.
        known = next((number for number, (head, _) in enumerate(unsure, 1) if head == newest), 0)
        self._written(unsure[:known])
        done = [waiting for _, waiting in unsure[:known]]
        self._waiting.extendleft(reversed([row for row in batch if row not in done]))
        if not known:
            self._head = newest
            self._report(f"the newest row is {newest}, expected {after}: rows were changed, added or removed")

    def _written(self, rows: Sequence[tuple[Head, _Waiting]]) -> None:
        for head, waiting in rows:
            self._head = head
            self._counter.labels("written").inc()
            if waiting.written is not None and not waiting.written.done():
                waiting.written.set_result(head.number)

    def _report(self, problem: str) -> None:
        """The chain's end is not the one that was written: the log and the chain itself name it."""
        log.error("audit_altered", problem=problem, todo="fl audit verify; compare with a backup or an export")
        self._counter.labels("altered").inc()
        record = AuditRecord("coordinator", "", ALTERED, "audit", "broken", problem)
        self._waiting.appendleft(self._entry(record, None))

    def _report_missing(self, why: str, head: Head) -> None:
        """The file of the newest row is not there: rows that were removed from the end would not be found."""
        if not head.number:
            return  # the first start
        problem = f"{self._head_file.name} {why}: rows removed behind row {head.number} before now are not found"
        log.warning("audit_head_missing", problem=problem, todo="compare with a head of before: fl audit verify --head")
        record = AuditRecord("coordinator", "", HEAD_MISSING, "audit", "missing", problem)
        self._waiting.appendleft(self._entry(record, None))

    # In the ledger's thread.

    def _add(self, rows: Sequence[AuditRow], after: Head, durable: bool) -> Head:
        newest = self._ledger.store.add_audit_rows(rows, after, fsynced=durable)
        if durable and newest == rows[-1].head:
            self._write_head(newest)
        return newest

    def _write_head(self, head: Head) -> None:
        try:
            with atomic_writer(self._head_file, durable=False) as file:
                file.write(f"{head}\n".encode())
        except OSError as error:
            log.warning("audit_head_not_written", error=str(error))

    def _known_head(self) -> Head | str:
        """The newest row as the file has it; or why it is not known, as a phrase."""
        try:
            return Head.parse(self._head_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return "is missing"
        except (OSError, ValueError) as error:
            return f"cannot be read ({error})"

    def _read_end(self) -> tuple[Head, str]:
        """The newest row, and what is wrong with the end of the chain, or ""."""
        newest = self._ledger.store.newest_audit_rows(2)
        head = newest[-1].head if newest else START
        if inserted := self._ledger.store.audit_rows(_LEAST, 0, 1, {}).rows:
            return head, f"row {inserted[0].number} was inserted: the first one is row 1"
        if newest:
            before = newest[-2].head if len(newest) > 1 else START
            if before.number + 1 != head.number:
                return head, missing(before.number + 1, head.number - 1)
            if newest[-1].linked(before.hash) != head.hash:
                return head, f"row {head.number} does not match its hash"
        return head, self._against_file(head)

    def _against_file(self, head: Head) -> str:
        known = self._known_head()
        if isinstance(known, str):
            return ""
        if known.number > head.number:
            return f"{missing(head.number + 1, known.number)} at the end: row {known} was written"
        kept = self._ledger.store.audit_rows(known.number, known.number, 1, {}).rows
        if known.number and (not kept or kept[0].hash != known.hash):
            return f"row {known.number} is not the one that was written, which has the hash {known.hash.hex()}"
        return ""


def keep_head(state_dir: Path, head: Head) -> None:
    """Remember the newest row while another coordinator writes, unless a newer one is known: then rows were removed."""
    file = state_dir / HEAD_FILE
    try:
        known = Head.parse(file.read_text(encoding="utf-8")).number
    except (OSError, ValueError):
        known = -1
    if head.number > known:
        with suppress(OSError), atomic_writer(file, durable=False) as kept:
            kept.write(f"{head}\n".encode())


def _linked(head: Head, batch: Sequence[_Waiting]) -> list[AuditRow]:
    rows, previous = [], head
    for waiting in batch:
        row = AuditRow(previous.number + 1, waiting.time_us, **limited(asdict(waiting.record)))
        rows.append(row := replace(row, hash=row.linked(previous.hash)))
        previous = row.head
    return rows


def _failed(row: _Waiting, error: Exception) -> bool:
    """Pass the error to a caller that wants it. Returns whether the row is done with."""
    if row.at_once and row.written is not None and not row.written.done():
        row.written.set_exception(error)
    return row.at_once


Row = TypeVar("Row", AuditRecord, HistoryRecord)


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
            times = "once more" if suppressed.count == 1 else f"{counted(suppressed.count, 'time')} more"
            last = f", the last one: {suppressed.last.detail}" if suppressed.last.detail else ""
            self._write(replace(suppressed.last, detail=f"{times} within a minute{last}"))


class AuditLog(AuditWriter):
    """Writes audit records to the ledger, within the limits of each kind of row. Lives on the event loop."""

    def __init__(self, ledger: Ledger, state_dir: Path, refusals_per_minute: int, counter: Counter) -> None:
        """refusals_per_minute: rows for one address; 0 for no limit. counter: see `AuditWriter`."""
        super().__init__(ledger, state_dir, counter)
        self._reads_of_actor = RowLimit(READS, self.add_later)
        self._reads = RowLimit(1, self._add_read)
        self._refusals = RowLimit(REFUSALS if refusals_per_minute else 0, self.add_later)
        self._refusals_of_caller = RowLimit(refusals_per_minute, self._add_refusal)

    async def record_in_time(self, record: AuditRecord) -> None:
        """Add a row, and wait for it for ANSWER_S at most. Then the row is written when the ledger can."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await self.add(record)

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
            self.add_later(record)

    def _add_refusal(self, record: AuditRecord) -> None:
        if self._refusals.passes("", record):
            self.add_later(record)

    async def close(self) -> None:
        """Write the counts of the last minute, and what waits."""
        for limit in (self._reads, self._reads_of_actor, self._refusals_of_caller, self._refusals):
            limit.close()
        await super().close()


def _host(row: AuditRecord) -> str:
    """The address without the port, which differs for each connection."""
    return row.address.rpartition(":")[0] or row.address
