"""`GetOverview`: counts of clients and runs, and the runs in short, the newest first."""

from __future__ import annotations

import time
from collections import Counter
from heapq import nlargest
from itertools import islice
from typing import Any

import grpc.aio

from fl_common.program import impetus_version
from fl_server.clients.attendance import Presence
from fl_server.clients.fleet import Fleet
from fl_server.errors import InvalidInput
from fl_server.pages import Cursor, Entries, Position
from fl_server.rounds.state import Phase
from fl_server.rpc.access import HIDDEN, OperatorCalls
from fl_server.rpc.clients import SEARCH_CHARS
from fl_server.rpc.views import MOST_SHOWN, add_leadership, add_waiting, attention, hide_cohort, run_reason
from fl_server.run.run import Run
from fl_server.runs.attention import Need
from fl_server.runs.coordinator import Coordinator
from fl_server.runs.table import NotLoaded
from fl_server.services import Services
from protos.fl.v1 import admin_pb2 as pb
from protos.wire import timestamp

Context = grpc.aio.ServicerContext[Any, Any]
PAGE_SIZE = 100
MOST_POINTS = 100
_RUNS_AT_ONCE = 25
"""Runs whose values are read in one call of the ledger."""
_MOST_KEPT = 4096
"""Runs whose values are kept."""


class OverviewCalls(OperatorCalls):
    """The call for the overview."""

    def __init__(self, services: Services, coordinator: Coordinator) -> None:
        super().__init__(services, coordinator)
        self._values: dict[str, tuple[tuple[int, int], list[pb.MetricPoint]]] = {}
        """The changes of each run's rounds, the number of points that its values were read for, and the values."""

    async def GetOverview(self, request: pb.GetOverviewRequest, context: Context) -> pb.GetOverviewResponse:
        """A page of runs, with the counts of all."""
        states = _states(request)
        if request.points > MOST_POINTS:
            raise InvalidInput("points", f"at most {MOST_POINTS}", request.points)
        newest = await self._services.ledger.history.newest()
        everything: list[Run | NotLoaded] = [*self._runs.loaded(), *self._runs.not_loaded()]
        wanted = {_position(run): run for run in everything if _is_wanted(run, states, request.search.lower())}
        request.page_size = request.page_size or PAGE_SIZE
        of = ("overview", sorted(states), request.search, request.points)
        cursor = Cursor.of_request(request, (float, str), *of)

        async def read(after: Position | None, count: int) -> Entries[pb.RunOverview]:
            chosen = nlargest(count, (position for position in wanted if after is None or position < after))
            runs = [wanted[position] for position in chosen]
            shown = [_not_loaded(run) if isinstance(run, NotLoaded) else _loaded(run) for run in runs]
            await self._add_points(shown, request.points)
            return list(zip(chosen, shown, strict=True))

        page, needs = await cursor.page(read), self._coordinator.attention.all()
        response = pb.GetOverviewResponse(
            runs=page.entries,
            next_page_token=page.next_token,
            runs_by_state=Counter(map(_state, everything)),
            clients_by_state={**clients_by_state(self._services.fleet), "attention": len(needs)},
            attention=[
                pb.ClientInNeed(client_id=client, attention=self._attention(reasons[0]))
                for client, reasons in islice(needs.items(), MOST_SHOWN)
            ],
            history_number=newest,
            version=impetus_version(),
            now=timestamp(time.time()),
            runs_found=len(wanted),
        )
        add_leadership(self._services.leading, response)
        return response

    def _attention(self, need: Need) -> pb.Attention:
        shown = attention(need)
        if need.run_id and self._runs.hides(need.run_id):
            shown.run_id = HIDDEN
        return shown

    async def _add_points(self, shown: list[pb.RunOverview], count: int) -> None:
        """Add the newest values of each run. They are read again only after a commit or an evaluation."""
        ledger, loaded = self._services.ledger, {run.id: run for run in self._runs.loaded()}
        measured = {run.run_id: run for run in shown if count and run.metric in run.newest_metrics}
        keys = {run_id: (loaded[run_id].rounds.changes, count) for run_id in measured}
        old = [run_id for run_id, key in keys.items() if self._values.get(run_id, (None,))[0] != key]
        if len(self._values) > _MOST_KEPT:
            self._values.clear()
            old = list(keys)
        for begin in range(0, len(old), _RUNS_AT_ONCE):
            some = old[begin : begin + _RUNS_AT_ONCE]
            wanted = {run_id: measured[run_id].metric for run_id in some}
            for run_id, values in (await ledger.do(ledger.store.newest_values, wanted, count)).items():
                points = [pb.MetricPoint(round=round_, value=value) for round_, value in values]
                self._values[run_id] = keys[run_id], points
        for run_id, run in measured.items():
            run.points.extend(self._values[run_id][1] if run_id in self._values else ())


def clients_by_state(fleet: Fleet) -> dict[str, int]:
    """The number of clients in each state, and of those that are banned, draining or quarantined."""
    records = fleet.records.in_memory()
    present, suspect = fleet.attendance.roster.count(Presence.PRESENT), fleet.attendance.roster.count(Presence.SUSPECT)
    return {
        "present": present,
        "suspect": suspect,
        "lost": max(0, len(records) - present - suspect),
        "banned": sum(record.banned for record in records.values()),
        "draining": sum(record.draining for record in records.values()),
        "quarantined": sum(client in records for client in fleet.quarantine.clients()),
    }


def _states(request: pb.GetOverviewRequest) -> set[str]:
    if unknown := [state for state in request.states if state not in pb.RunState.values()]:
        raise InvalidInput("states", f"some of {', '.join(pb.RunState.keys())}", unknown[0])
    if len(request.search) > SEARCH_CHARS:
        raise InvalidInput("search", f"at most {SEARCH_CHARS} characters", len(request.search))
    return {pb.RunState.Name(state).removeprefix("RUN_STATE_").lower() for state in request.states}


def _position(run: Run | NotLoaded) -> Position:
    return run.record.created_at, run.record.run_id


def _state(run: Run | NotLoaded) -> str:
    return "unspecified" if isinstance(run, NotLoaded) else run.status


def _is_wanted(run: Run | NotLoaded, states: set[str], text: str) -> bool:
    if states and _state(run) not in states:
        return False
    if isinstance(run, NotLoaded):
        names = (run.record.run_id, run.named("task"), run.named("algorithm"), run.owner or "")
    else:
        config = run.config
        names = (run.id, config.task.name, config.algorithm.name, config.owner or "")
    return any(text in name.lower() for name in names)


def _not_loaded(run: NotLoaded) -> pb.RunOverview:
    return pb.RunOverview(
        run_id=run.record.run_id,
        state=f"RUN_STATE_{(run.state or 'unspecified').upper()}",
        reason=run.explained,
        task=run.named("task"),
        algorithm=run.named("algorithm"),
        owner=run.owner or "",
        created=timestamp(run.record.created_at),
        ended=None if run.record.ended_at is None else timestamp(run.record.ended_at),
    )


def _loaded(run: Run) -> pb.RunOverview:
    state, record, rounds, config = run.state, run.record, run.rounds, run.config
    shown = pb.RunOverview(
        run_id=run.id,
        state=f"RUN_STATE_{run.status.upper()}",
        reason=run_reason(run),
        task=config.task.name,
        algorithm=config.algorithm.name,
        owner=config.owner or "",
        rounds_done=rounds.committed,
        rounds_planned=state.rounds,
        phase="" if state.phase is Phase.ENDED else state.phase.value,
        cohort_size=state.policy.goal if state.policy.buffered else len(state.drawn),
        admitted=state.collected,
        metric=rounds.criterion.metric,
        newest_metrics=rounds.newest_metrics(),
        labels_suspected=len(run.context.label_order.suspected),
        below_due=len(rounds.shares.too_low),
        best=None if rounds.best is None else rounds.best.value,
        latest_commit=None if rounds.latest is None else timestamp(rounds.latest.committed_at),
        created=timestamp(record.created_at),
        ended=None if record.ended_at is None else timestamp(record.ended_at),
    )
    add_waiting(run, shown)
    if run.context.hides_cohorts:
        hide_cohort(shown)
    return shown
