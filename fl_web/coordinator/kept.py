"""What is kept for the views of the runs that were looked at last: rounds, and marked entries of the history."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from fl_web.coordinator.calls import Calls
from fl_web.facts.rounds import Round
from protos.fl.v1 import admin_pb2 as pb

_MOST_RUNS, _MOST_ROUNDS = 40, 60_000
"""The most runs, and rounds of all of them, that are kept in memory."""
_REREAD = 20
"""Newest rounds that are read again each time: their evaluations may have come since."""


class Rounds:
    """The committed rounds of the runs that were looked at last."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._kept: OrderedDict[str, list[Round]] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}

    async def of(self, run_id: str, since: float | None = None) -> list[Round]:
        """All committed rounds, in order. The list is not changed later. since: as of `Calls.call`."""
        lock = self._locks.setdefault(run_id, asyncio.Lock())
        async with lock:
            known = self._kept.get(run_id, [])
            rounds = known[: max(0, len(known) - _REREAD)]
            request = pb.ListRoundsRequest(run_id=run_id, page_size=1000, first_round=len(rounds))
            while True:
                page = await self._calls.call("ListRounds", request, pb.ListRoundsResponse, since)
                for summary in page.rounds:
                    rounds.append(Round.of(summary, rounds[-1] if rounds else None))
                if not page.next_page_token:
                    break
                request.page_token = page.next_page_token
        self._keep(run_id, rounds)
        return rounds

    def _keep(self, run_id: str, rounds: list[Round]) -> None:
        self._kept[run_id] = rounds
        self._kept.move_to_end(run_id)
        while len(self._kept) > 1 and (
            len(self._kept) > _MOST_RUNS or sum(map(len, self._kept.values())) > _MOST_ROUNDS
        ):
            oldest, _ = self._kept.popitem(last=False)
            self._locks.pop(oldest, None)


_AT_ONCE, _MOST_READ = 1000, 50_000
"""Entries in a call, and at most for a run."""
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
        known, page, marked, read = self._runs.get(run_id, _Known()), newest, list[pb.HistoryEntry](), 0
        while True:
            new = [entry for entry in page.entries if entry.number > known.number]
            marked = [entry for entry in new if entry.event in self._events] + marked
            read += len(page.entries)
            if len(new) < len(page.entries) or not page.first_number or read >= _MOST_READ:
                break
            page = await self._read(run_id, _AT_ONCE, page.first_number)
        last = max((entry.number for entry in newest.entries), default=known.number)
        self._runs[run_id] = _Known(known.entries + marked, last)
        self._runs.move_to_end(run_id)
        while len(self._runs) > _MOST_RUNS:
            self._runs.popitem(last=False)
        return self._runs[run_id].entries
