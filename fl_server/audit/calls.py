"""The audit log as calls see it: which calls are recorded and with what, and the list of its rows.

A call of the Admin service that changes something has two rows: "asked", durable before it begins, and its result. So
no change is in effect without a row, also after SIGKILL or a power cut. A call that cannot be recorded is not carried
out. Calls of clients are recorded only if they are refused for their identity.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from grpc import StatusCode

from fl_common.audit import AuditRow
from fl_server import identity
from fl_server.audit.log import AuditLog, AuditRecord
from fl_server.errors import InvalidInput, ServerError
from fl_server.identity import ANYBODY, caller
from fl_server.pages import Cursor, Entries, Position
from fl_server.store.database.store import SCANNED
from fl_server.store.errors import StoreFull, StoreTakenOver
from fl_server.store.ledger import Ledger
from protos.fl.v1 import admin_pb2 as pb
from protos.wire import filled

Handler = Callable[[Any, Any], Any]

NEWEST_MOST = 10_000
_FILTERS = ("actor", "method", "subject", "result")
_SINCE_LIMIT_S = 10**11
"""Seconds; later times do not fit into the ledger."""


def _nothing(_: Any) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the rows of a method have. Only named fields are kept, so that no secret of a request gets into a row."""

    changes: bool = True
    """Whether the call changes something or gives a model away: then a row is durable before it begins."""
    subject: Callable[[Any], str] = _nothing
    """Reads the subject from the request."""
    details: tuple[str, ...] = ()
    """Fields of the request."""
    made: Callable[[Any], str] = _nothing
    """Reads the subject of a call that makes something from the response."""

    def detail(self, request: Any) -> str:
        """The named fields that are set: "reason=lost device". A stream of requests has none."""
        if not self.details:
            return ""
        given = {field.name: value for field, value in request.ListFields() if field.name in self.details}
        return ", ".join(f"{name}={given[name]}" for name in self.details if name in given)


def code_of(error: Exception) -> StatusCode:
    """The status code with which an error ends its call."""
    if isinstance(error, StoreFull | StoreTakenOver):
        return StatusCode.UNAVAILABLE
    return error.code if isinstance(error, ServerError) else StatusCode.INTERNAL


def record_of(method: str, subject: str, result: str, detail: str = "") -> AuditRecord:
    """A record of the current call."""
    who = caller.get()
    return AuditRecord(
        "anybody" if who is ANYBODY else str(who), identity.address.get(), method, subject, result, detail
    )


class RecordedCall:
    """One call of the Admin service, for the interceptor."""

    def __init__(self, auditor: AuditLog, name: str, what: Recorded, request: Any) -> None:
        self._auditor, self._name, self._what, self._request = auditor, name, what, request
        self._subject, self._detail = what.subject(request), what.detail(request)

    async def answer(self, inner: Handler, context: Any) -> Any:
        """The response. Raises StoreError if a change cannot be recorded: then nothing was done."""
        await self._ask()
        try:
            response = await inner(self._request, context)
        except Exception as error:
            await self._ended(code_of(error).name.lower(), str(error))
            raise
        except asyncio.CancelledError:
            self._ended_later("cancelled")
            raise
        self._subject = self._what.made(response) or self._subject
        await self._ended("ok")
        return response

    async def stream(self, responses: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The responses. Raises StoreError if the call cannot be recorded: then nothing was sent."""
        await self._ask(begins=True)
        result, why = "cancelled", ""
        try:
            async with aclosing(responses) as messages:  # type: ignore[type-var]  # a handler is an async generator
                async for message in messages:
                    yield message
            result = "ok"
        except Exception as error:
            result, why = code_of(error).name.lower(), str(error)
            raise
        finally:
            self._ended_later(result, why)

    async def _ask(self, *, begins: bool = False) -> None:
        if self._what.changes:
            number = await self._auditor.add(self._record("asked"), at_once=True)
            self._detail = ", ".join(filter(None, (f"asked in row {number}", self._detail)))
        elif begins:
            self._auditor.record_read(self._record("begun"))

    async def _ended(self, result: str, why: str = "") -> None:
        if not self._what.changes:
            self._auditor.record_read(self._record(result, why))
            return
        await self._auditor.record_in_time(self._record(result, why))

    def _ended_later(self, result: str, why: str = "") -> None:
        """Record the end without waiting: the call is being cancelled, or its caller has all that it wanted."""
        record = self._record(result, why)
        (self._auditor.add_later if self._what.changes else self._auditor.record_read)(record)

    def _record(self, result: str, why: str = "") -> AuditRecord:
        return record_of(self._name, self._subject, result, "; ".join(filter(None, (self._detail, why))))


async def audit_page(ledger: Ledger, request: pb.ListAuditRequest) -> pb.ListAuditResponse:
    """A page of the audit log, the oldest row first. Rows that come after the first page are not listed."""
    matching: dict[str, str | int] = {name: value for name in _FILTERS if (value := getattr(request, name))}
    if request.HasField("since"):
        if not 0 <= request.since.seconds < _SINCE_LIMIT_S:
            raise InvalidInput("since", "a time from 1970 on", request.since.seconds)
        matching["since_us"] = request.since.seconds * 10**6 + request.since.nanos // 1000
    if request.limit > NEWEST_MOST:
        raise InvalidInput("limit", f"at most {NEWEST_MOST:,} rows", f"{request.limit:,}; use page_size")
    newest = await ledger.do(ledger.store.newest_audit_rows, 1)
    cursor = Cursor.of_request(request, (int, int), "audit", matching, request.first, request.limit)
    if cursor.after is not None:
        begin, last = cursor.after[0] + 1, cursor.after[1]
    else:
        last = newest[0].number if newest else 0
        begin = min(max(1, request.first), last + 1)
    search = _Search(ledger, last, matching)
    if cursor.after is None and request.limit:
        begin = await search.first_of_newest(begin, request.limit)

    async def read(after: Position | None, count: int) -> Entries[pb.AuditEntry]:
        rows = await search.rows(begin if after is None else max(begin, after[0] + 1), count)
        return [((row.number, last), audit_entry(row)) for row in rows]

    page = await cursor.page(read)
    response = pb.ListAuditResponse(entries=page.entries, next_page_token=page.next_token)
    if newest and newest[0].number > 0:
        response.head_number, response.head_hash = newest[0].head
    return response


class _Search:
    """Rows that match, up to a last one. Other calls of the ledger have their turn in between."""

    def __init__(self, ledger: Ledger, last: int, matching: Mapping[str, str | int]) -> None:
        self._ledger, self._last, self._matching = ledger, last, matching

    async def rows(self, begin: int, count: int) -> list[AuditRow]:
        """The first `count` rows."""
        matching: list[AuditRow] = []
        while begin <= self._last and len(matching) < count:
            rows, begin = await self._ledger.do(
                self._ledger.store.audit_rows, begin, self._last, count - len(matching), self._matching
            )
            matching += rows
        return matching

    async def first_of_newest(self, begin: int, limit: int) -> int:
        """Number of the first of the newest `limit` rows."""
        if not self._matching:
            return max(begin, self._last - limit + 1)
        newest: deque[int] = deque(maxlen=limit)
        while begin <= self._last:
            rows, begin = await self._ledger.do(
                self._ledger.store.audit_rows, begin, self._last, SCANNED, self._matching
            )
            newest.extend(row.number for row in rows)
        return newest[0] if newest else self._last + 1


def audit_entry(row: AuditRow) -> pb.AuditEntry:
    """A row as a message."""
    entry = filled(pb.AuditEntry, row)
    entry.time.seconds, entry.time.nanos = row.time_us // 10**6, row.time_us % 10**6 * 1000
    return entry
