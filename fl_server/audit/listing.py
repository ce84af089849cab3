"""`ListAudit`: the rows of the audit log, page by page."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from fl_common.audit import AuditRow
from fl_server.errors import InvalidInput
from fl_server.pages import Cursor, Entries, Position
from fl_server.store.database.ledger_audit import SCANNED
from fl_server.store.ledger import Ledger
from protos.fl.v1 import admin_pb2 as pb

NEWEST_MOST = 10_000
_FILTERS = ("actor", "method", "subject", "result")
_SINCE_LIMIT_S = 10**11
"""Seconds; later times do not fit into the ledger."""


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
    entry = pb.AuditEntry(
        number=row.number, actor=row.actor, address=row.address, method=row.method, subject=row.subject,
        result=row.result, detail=row.detail, hash=row.hash,
    )  # fmt: skip
    entry.time.seconds, entry.time.nanos = row.time_us // 10**6, row.time_us % 10**6 * 1000
    return entry
