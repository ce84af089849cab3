"""The committed rounds of runs. Kept for the views: only new rounds are read again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from fl_web.coordinator.calls import Calls
from fl_web.facts.rounds import Round
from protos.fl.v1 import admin_pb2 as pb

_MOST_RUNS, _MOST_ROUNDS = 40, 60_000
"""Kept in memory."""
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
