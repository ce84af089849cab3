"""The few entries of a run's history that its curves mark, out of the thousands that it has. Kept for the views."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from protos.fl.v1 import admin_pb2 as pb

_AT_ONCE, _MOST_READ = 1000, 50_000
"""Entries in a call, and at most for a run."""
_MOST_RUNS = 40
Read = Callable[[str, int, int], Awaitable[pb.ListHistoryResponse]]
"""(subject, limit, before) -> the newest entries before a number, the oldest first."""


@dataclass(slots=True)
class _Known:
    """What was read of a run's history."""

    entries: list[pb.HistoryEntry] = field(default_factory=list)
    """The marked ones, in order."""
    number: int = 0
    """Of the newest entry that was read."""


class MarkedEntries:
    """The marked entries of the runs that were looked at last. Only newer entries are read again."""

    def __init__(self, read: Read, events: Collection[str]) -> None:
        """events: names of those that are marked."""
        self._read, self._events = read, frozenset(events)
        self._runs: OrderedDict[str, _Known] = OrderedDict()

    async def of(self, run_id: str, newest: pb.ListHistoryResponse) -> list[pb.HistoryEntry]:
        """All marked entries of a run, in order. newest: the end of its history, of any length."""
        known, page, found, read = self._runs.get(run_id, _Known()), newest, list[pb.HistoryEntry](), 0
        while True:
            new = [entry for entry in page.entries if entry.number > known.number]
            found = [entry for entry in new if entry.event in self._events] + found
            read += len(page.entries)
            if len(new) < len(page.entries) or not page.first_number or read >= _MOST_READ:
                break
            page = await self._read(run_id, _AT_ONCE, page.first_number)
        last = max((entry.number for entry in newest.entries), default=known.number)
        self._runs[run_id] = _Known(known.entries + found, last)
        self._runs.move_to_end(run_id)
        while len(self._runs) > _MOST_RUNS:
            self._runs.popitem(last=False)
        return self._runs[run_id].entries
