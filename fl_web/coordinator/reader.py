"""Everything that the views read from the coordinator, with the identity of one person."""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import cast

import grpc.aio

from fl_web.coordinator.calls import Calls, Metadata
from fl_web.coordinator.watches import HistoryWatch, RunWatches
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
                page = await self._calls.call(request, pb.ListRoundsResponse, since)
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
    """The number of the newest entry that was read."""


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


MARKED = {
    "run_recovered": "restart",
    "round_restarted": "restart",
    "client_states_reset": "restart",
    "update_dropped": "refused",
    "culprit_dropped": "refused",
    "run_paused": "pause",
    "run_resumed": "pause",
}
"""Events of a run that are marked on its time axis -> the kind of the mark."""
_ACTIVE = frozenset({pb.RUN_STATE_RUNNING, pb.RUN_STATE_WAITING, pb.RUN_STATE_PAUSED})
_UNCHANGED_S = 15.0
"""A reply that changes with the history alone is read again after this time even if there was no new entry."""
SPARK_POINTS = 40
"""Newest values of a run's metric in a list of runs."""


class Reader:
    """The Admin service for reading. One for each identity: its watches and replies serve all browsers of it.

    Raises `WebError`; AioRpcError with UNAUTHENTICATED where the coordinator does not know the identity.
    """

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> None:
        self._calls, self._since = Calls(channel, metadata), cast(float | None, None)
        self.history = HistoryWatch(self._calls)
        self.watches = RunWatches(self._calls)
        self._rounds = Rounds(self._calls)
        self._marked = MarkedEntries(self.entries, MARKED)

    def since(self, moment: float) -> Reader:
        """The same for a reading of what is true at `moment` (by the monotonic clock) or later.

        It shares all calls with other readings of that kind.
        """
        other = copy.copy(self)
        other._since = moment  # noqa: SLF001 - of its own class
        return other

    def _unchanged_since(self) -> float | None:
        """The result of `_since`, for what changes with an entry of the history alone."""
        if self._since is None:
            return None
        return min(self._since, max(self.history.unchanged_since, self._since - _UNCHANGED_S))

    async def close(self) -> None:
        """End all watches. The channel is the caller's."""
        await self.history.closed()
        await self.watches.close()

    async def overview(
        self, size: int = 1, token: str = "", states: Sequence[pb.RunState] = (), search: str = ""
    ) -> pb.GetOverviewResponse:
        """Counts of runs and clients, and a page of runs, the newest first. states: only runs in one of these."""
        request = pb.GetOverviewRequest(
            page_size=size, page_token=token, states=states, search=search, points=SPARK_POINTS
        )
        since = self._unchanged_since() if states and not set(states) & _ACTIVE else self._since
        return await self._calls.call(request, pb.GetOverviewResponse, since)

    async def run(self, run_id: str) -> pb.RunStatus:
        """One run. Raises NotFound."""
        request = pb.GetRunRequest(run_id=run_id)
        return (await self._calls.call(request, pb.GetRunResponse, self._since)).run

    async def rounds(self, run_id: str) -> list[Round]:
        """All committed rounds of a run, in order."""
        return await self._rounds.of(run_id, self._since)

    async def cohort(self, run_id: str, size: int) -> pb.ListCohortResponse:
        """The first clients of the current round, each with its phase."""
        request = pb.ListCohortRequest(run_id=run_id, page_size=size)
        return await self._calls.call(request, pb.ListCohortResponse, self._since)

    async def evaluations(self, run_id: str, size: int) -> pb.ListEvaluationsResponse:
        """The first clients' evaluations of the newest evaluated round. Raises WrongInput if there is none."""
        request = pb.ListEvaluationsRequest(run_id=run_id, page_size=size)
        return await self._calls.call(request, pb.ListEvaluationsResponse, self._since)

    async def clients(self, request: pb.ListClientsRequest) -> pb.ListClientsResponse:
        """A page of clients."""
        return await self._calls.call(request, pb.ListClientsResponse, self._since)

    async def client(self, client_id: str, history: int) -> pb.GetClientResponse:
        """One client with its newest history entries. Raises NotFound."""
        request = pb.GetClientRequest(client_id=client_id, history=history)
        return await self._calls.call(request, pb.GetClientResponse, self._since)

    async def entries(self, subject: str = "", limit: int = 100, before: int = 0) -> pb.ListHistoryResponse:
        """The newest `limit` entries of the history before a number (0: of all), the oldest first; at most 1,000."""
        request = pb.ListHistoryRequest(subject=subject, limit=limit, page_size=limit, before_number=before)
        return await self._calls.call(request, pb.ListHistoryResponse, self._unchanged_since())

    async def marked_entries(self, run_id: str, newest: pb.ListHistoryResponse) -> list[pb.HistoryEntry]:
        """The entries of a run that its curves mark, in order. newest: the end of its history."""
        return await self._marked.of(run_id, newest)

    async def releases(self, size: int, token: str = "", model: str = "", kind: str = "") -> pb.ListReleasesResponse:
        """A page of releases, the newest first. model, kind: only of this one; "" for all."""
        request = pb.ListReleasesRequest(page_size=size, page_token=token, model=model, kind=kind)
        return await self._calls.call(request, pb.ListReleasesResponse, self._since)

    async def release(self, kind: str, model: str, version: int, devices: int) -> pb.GetReleaseResponse:
        """A release with its first devices. version: 0 for the newest. Raises NotFound."""
        request = pb.GetReleaseRequest(kind=kind, model=model, version=version, page_size=devices)
        return await self._calls.call(request, pb.GetReleaseResponse, self._since)

    async def who_am_i(self) -> pb.WhoAmIResponse:
        """The identity, its roles and the methods that it may call."""
        since = None if self._since is None else self._since - _UNCHANGED_S  # a session has one identity until its end
        return await self._calls.call(pb.WhoAmIRequest(), pb.WhoAmIResponse, since)

    def model(self, run_id: str, which: str, model: str) -> AsyncGenerator[pb.ExportModelResponse, None]:
        """Header and chunks of a model as safetensors. which, model: see ExportModelRequest."""
        request = pb.ExportModelRequest(run_id=run_id, round=which, model=model)
        return self._calls.stream(request, pb.ExportModelResponse)
