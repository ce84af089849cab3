"""The history for operators: lists, and the stream of new entries. An entry that the caller may not see is left out.

A run that is created is in the coordinator's table before its first entry is read here: the table is filled when the
ledger's call returns, and this reads with a later call. So the owner of an entry's run is always known.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fl_server.errors import InvalidInput
from fl_server.rpc.access.owners import OwnedRuns
from fl_server.rpc.pages import ENTRIES_AT_ONCE, Cursor, Entries, Position
from fl_server.rpc.views import history_entry
from fl_server.store.ledger import Ledger
from protos.fl.v1 import admin_pb2 as pb

HISTORY_DEFAULT, HISTORY_MOST = 1000, 10_000
"""Entries of a call that names no number, and most entries in one reply."""
_SUBJECT_CHARS = 256
"""Longer than any id."""
_LARGEST = 2**63 - 1


class HistoryCalls:
    """Answers the calls for the history."""

    def __init__(self, ledger: Ledger, runs: OwnedRuns) -> None:
        self._ledger, self._runs = ledger, runs

    async def page(self, request: pb.ListHistoryRequest) -> pb.ListHistoryResponse:
        """A page of entries, oldest first."""
        subject, limit = request.subject[:_SUBJECT_CHARS], request.limit or HISTORY_DEFAULT
        before = _number("before_number", request.before_number)
        cursor = Cursor.of_request(request, (int, int), "history", subject, limit, before)
        if self._runs.hides(subject):
            return pb.ListHistoryResponse()  # as for a subject without entries
        ledger, is_first = self._ledger, cursor.after is None
        if cursor.after is None:
            begin, last = await ledger.do(ledger.store.history_span, subject, limit, before or _LARGEST)
        else:  # entries that came after the first page are not listed
            begin, last = cursor.after

        async def read(after: Position | None, count: int) -> Entries[pb.HistoryEntry]:
            first, seen = after[0] + 1 if after else begin, list[tuple[Position, pb.HistoryEntry]]()
            at_once = count if self._runs.all_seen else ENTRIES_AT_ONCE
            while len(seen) < count:  # entries that the caller may not see are passed over
                entries = await ledger.do(ledger.store.history_between, subject, (first, last), at_once)
                shown = ((number, entry) for number, entry in entries if not self._runs.hides_entry(entry))
                seen += [((number, last), history_entry(number, entry)) for number, entry in shown]
                if len(entries) < at_once:
                    break
                first = entries[-1][0] + 1
            return seen[:count]

        page = await cursor.page(read)
        return pb.ListHistoryResponse(
            entries=page.entries, next_page_token=page.next_token, first_number=begin if is_first else 0
        )

    async def watch(self, request: pb.WatchHistoryRequest) -> AsyncGenerator[pb.WatchHistoryResponse, None]:
        """The entries after a number, then new ones, without end."""
        subject = request.subject[:_SUBJECT_CHARS]
        after = _number("after_number", request.after_number) if request.HasField("after_number") else None
        is_first = True
        async with aclosing(self._ledger.history.after(after, subject)) as batches:
            async for batch in batches:
                hidden = self._runs.hides(subject)
                entries = [
                    line.shown(history_entry)
                    for line in batch.lines
                    if not hidden and not self._runs.hides_entry(line.record)
                ]
                if entries or is_first:
                    yield pb.WatchHistoryResponse(entries=entries, last_number=batch.last)
                is_first = False


def _number(field: str, number: int) -> int:
    if number < 0:
        raise InvalidInput(field, "the number of an entry, or 0", number)
    return number
