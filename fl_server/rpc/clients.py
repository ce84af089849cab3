"""Clients for operators: the list, filtered, searched, in any order and in pages, and one client in detail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest, nsmallest
from typing import Any

import grpc.aio

from fl_common.names import VERSION_PATTERN, version_of
from fl_server.clients.contested_identities import Contest
from fl_server.clients.fleet import Denials, Fleet, OperatorActions
from fl_server.clients.sessions import Origin
from fl_server.errors import InvalidInput, NoSuchRun
from fl_server.identity import actor
from fl_server.pages import Cursor, Entries, Position
from fl_server.rpc.access import HIDDEN, OperatorCalls
from fl_server.rpc.lists import HISTORY_MOST
from fl_server.rpc.views import client_status, history_entry
from fl_server.run.run import Run
from fl_server.runs.attention import ClientAttention, Need
from fl_server.runs.coordinator import Coordinator
from fl_server.services import Services
from fl_server.store.client_work import ClientWork
from fl_server.store.records import ClientRecord, HistoryRecord
from protos.fl.v1 import admin_pb2 as pb
from protos.wire import filled, timestamp

Context = grpc.aio.ServicerContext[Any, Any]
_SHOWN_HISTORY = 10
"""Entries of one client's history, unless the call names a number."""
MARKS = ("banned", "draining", "quarantined", "attention")
"""What may apply to a client in any state."""
STATES = ("present", "suspect", "lost")
SEARCH_CHARS = 256
_AT_ONCE = 2000
"""Clients that are looked at before the event loop has its turn."""
Key = Callable[[ClientRecord], int | float]
Numbered = tuple[int, HistoryRecord]


_UNKNOWN = -1.0
_BY_WORK: dict[int, Callable[[ClientWork], float]] = {
    pb.CLIENT_ORDER_UPDATES_REFUSED: lambda work: float(work.refused),
    pb.CLIENT_ORDER_FAILED: lambda work: float(work.failed),
    pb.CLIENT_ORDER_FAILED_SHARE: lambda work: work.share("failed"),
    pb.CLIENT_ORDER_WORK_SECONDS: lambda work: _UNKNOWN if (s := work.usual("work_s")) is None else s,
    pb.CLIENT_ORDER_TRANSFER_SECONDS: lambda work: _UNKNOWN if (s := work.usual("transfer_s")) is None else s,
    pb.CLIENT_ORDER_LAST_SHARE: lambda work: work.last_share,
    pb.CLIENT_ORDER_EPSILON: lambda work: _UNKNOWN if work.epsilon is None else work.epsilon,
}


class ClientCalls(OperatorCalls):
    """The calls about clients."""

    def __init__(self, services: Services, coordinator: Coordinator) -> None:
        super().__init__(services, coordinator)
        self._clients = OperatorActions(services.ledger, services.fleet)
        self._denials = Denials(services.config, services.ledger, services.revocations, services.fleet)

    async def ListClients(self, request: pb.ListClientsRequest, context: Context) -> pb.ListClientsResponse:
        """A page of clients: in the order of id bytes, or in another one."""
        key, kind = await self._order(request.order)
        wanted = _Wanted(self._services.fleet, self._coordinator.attention, request)
        cursor = Cursor.of_request(request, (str,) if kind is None else (kind, str), *wanted.of)
        positions: list[Position] = []
        for number, record in enumerate(list(self._services.fleet.records.in_memory().values()), 1):
            if wanted.has(record):
                positions.append((record.client_id,) if key is None else (key(record), record.client_id))
            if not number % _AT_ONCE:
                await asyncio.sleep(0)
        first = _first_descending if request.descending else _first

        async def read(after: Position | None, count: int) -> Entries[pb.ClientStatus]:
            chosen = first(positions, after, count)
            ledger = self._services.ledger  # which has the counters
            records = await ledger.do(ledger.store.clients_of, [position[-1] for position in chosen])
            known = {record.client_id: record for record in records}
            return [(position, self._status(known[position[-1]])) for position in chosen if position[-1] in known]

        page = await cursor.page(read)
        return pb.ListClientsResponse(clients=page.entries, next_page_token=page.next_token, found=len(positions))

    def _status(self, record: ClientRecord) -> pb.ClientStatus:
        status = client_status(self._services.fleet, record, self._coordinator.attention.of(record.client_id))
        self._hide_runs(status)
        return status

    def _hide_runs(self, status: pb.ClientStatus) -> None:
        """Leave out the ids of runs that the caller may not see, and work for a run with hidden cohorts."""
        if self._runs.hides_cohorts(status.run_id):
            status.run_id = ""
        named: tuple[Any, ...] = (status, status.work.last_failure, status.work.last_refusal, *status.attention)
        for message in named:
            if message.run_id and self._runs.hides(message.run_id):
                message.run_id = HIDDEN

    async def _order(self, order: int) -> tuple[Key | None, type | None]:
        """The key of an order and its type; None for the order of ids. Raises InvalidInput."""
        fleet, ledger = self._services.fleet, self._services.ledger
        if order in {pb.CLIENT_ORDER_UNSPECIFIED, pb.CLIENT_ORDER_ID}:
            return None, None
        of_record: dict[int, tuple[Key, type]] = {
            pb.CLIENT_ORDER_STATE: (lambda record: STATES.index(fleet.attendance.state(record.client_id)), int),
            pb.CLIENT_ORDER_LAST_SEEN: (fleet.attendance.last_seen, float),
            pb.CLIENT_ORDER_VERSION: (lambda record: _number(version_of(record.software)), int),
            pb.CLIENT_ORDER_ATTENTION: (lambda record: self._coordinator.attention.urgency(record.client_id), int),
        }
        if order in of_record:
            return of_record[order]
        if order not in pb.ClientOrder.values():
            raise InvalidInput("order", f"one of {', '.join(pb.ClientOrder.keys())}", order)
        if order == pb.CLIENT_ORDER_UPDATES_COUNTED:
            counts = await ledger.do(ledger.store.update_counts)
            return lambda record: counts.get(record.client_id, 0), int
        of_work = _BY_WORK[order]
        return lambda record: of_work(fleet.work.of(record.client_id)), float

    async def GetClient(self, request: pb.GetClientRequest, context: Context) -> pb.GetClientResponse:
        """One client, with its sessions and its history."""
        services, client_id = self._services, request.client_id
        if request.history > HISTORY_MOST:
            raise InvalidInput("history", f"at most {HISTORY_MOST:,} entries", f"{request.history:,}")
        known = services.fleet.records.get(client_id)
        counted = await services.ledger.do(services.ledger.store.client, client_id)
        store, most = services.ledger.store, request.history or _SHOWN_HISTORY
        span = await services.ledger.do(store.history_span, client_id, most)
        entries = await services.ledger.do(store.history_between, client_id, span, most)
        response = client_details(services.fleet, counted or known, entries, self._coordinator.attention.of(client_id))
        run_id = response.client.run_id
        at_work = self._runs.hides_cohorts(run_id)
        self._hide_runs(response.client)
        if response.client.run_id == HIDDEN:
            response.work = "works for a run of another operator"
        elif not at_work:
            response.work = work_of(self._coordinator, client_id, run_id)
        shown = not_drawn(self._runs.loaded(), client_id)
        response.not_drawn.extend(each for each in shown if not (at_work and each.reason == "at_work"))
        return response

    async def BanClient(self, request: pb.BanClientRequest, context: Context) -> pb.BanClientResponse:
        """Ban a client."""
        await self._clients.ban(request.client_id, request.reason, actor())
        await self._denials.write()
        return pb.BanClientResponse(client=await self._client(request.client_id))

    async def UnbanClient(self, request: pb.UnbanClientRequest, context: Context) -> pb.UnbanClientResponse:
        """End a client's ban."""
        await self._denials.write(lifted=request.client_id)  # before: a start must not ban it again
        await self._clients.unban(request.client_id, actor())
        return pb.UnbanClientResponse(client=await self._client(request.client_id))

    async def ReleaseClient(self, request: pb.ReleaseClientRequest, context: Context) -> pb.ReleaseClientResponse:
        """End a client's quarantine."""
        await self._clients.release(request.client_id, actor())
        return pb.ReleaseClientResponse(client=await self._client(request.client_id))

    async def ForgetClient(self, request: pb.ForgetClientRequest, context: Context) -> pb.ForgetClientResponse:
        """Remove a client."""
        banned = await self._clients.forget(request.client_id, actor())
        return pb.ForgetClientResponse(still_banned=banned)

    async def DrainClient(self, request: pb.DrainClientRequest, context: Context) -> pb.DrainClientResponse:
        """Give a client no new work, or work again."""
        await self._clients.drain(request.client_id, request.reason, request.undo, actor())
        return pb.DrainClientResponse(client=await self._client(request.client_id))

    async def _client(self, client_id: str) -> pb.ClientStatus:
        """The client with the counters of the ledger, which alone has them."""
        services, known = self._services, self._services.fleet.records.get(client_id)
        counted = await services.ledger.do(services.ledger.store.client, client_id)
        return self._status(counted or known)


class _Wanted:
    """The filters of a request."""

    def __init__(self, fleet: Fleet, attention: ClientAttention, request: pb.ListClientsRequest) -> None:
        """Raises InvalidInput for a state or a mark that does not exist."""
        self._fleet, self._attention, state, labels = fleet, attention, request.state, dict(request.labels)
        if state not in pb.ClientState.values():
            raise InvalidInput("state", f"one of {', '.join(pb.ClientState.keys())}", state)
        if unknown := sorted(set(request.marks) - set(MARKS)):
            raise InvalidInput("marks", f"some of {', '.join(MARKS)}", unknown[0][:SEARCH_CHARS])
        if len(request.search) > SEARCH_CHARS:
            raise InvalidInput("search", f"at most {SEARCH_CHARS} characters", len(request.search))
        self._name = pb.ClientState.Name(state).removeprefix("CLIENT_STATE_").lower() if state else ""
        self._labels, self._marks, self._text = labels, set(request.marks), request.search.lower()
        if request.older_than and VERSION_PATTERN.fullmatch(request.older_than) is None:
            raise InvalidInput("older_than", "a version such as 0.2 or 0.2.1", request.older_than[:SEARCH_CHARS])
        self._older_than = version_of(f"impetus {request.older_than}") if request.older_than else None
        self._quarantined = fleet.quarantine.clients() if "quarantined" in self._marks else ()
        order = (request.search, int(request.order), request.descending)
        self.of: list[object] = ["clients", state, labels, *order, sorted(self._marks), request.older_than]
        """What a token belongs to."""

    def has(self, record: ClientRecord) -> bool:
        """Whether the request is for this client."""
        return (
            (not self._name or self._fleet.attendance.state(record.client_id) == self._name)
            and self._labels.items() <= record.labels.items()
            and (not self._marks or self._is_marked(record))
            and (self._older_than is None or version_of(record.software) < self._older_than)
            and (not self._text or any(self._text in text.lower() for text in _texts(record)))
        )

    def _is_marked(self, record: ClientRecord) -> bool:
        return (
            ("banned" in self._marks and record.banned)
            or ("draining" in self._marks and record.draining)
            or record.client_id in self._quarantined
            or ("attention" in self._marks and bool(self._attention.of(record.client_id)))
        )


def _number(version: tuple[int, int, int]) -> int:
    """A version as one number in the same order: its parts have at most six digits."""
    return (version[0] * 1_000_000 + version[1]) * 1_000_000 + version[2]


def _texts(record: ClientRecord) -> Iterator[str]:
    yield record.client_id
    yield record.note
    for name, value in record.labels.items():
        yield f"{name}={value}"


def _first(positions: list[Position], after: Position | None, count: int) -> list[Position]:
    return nsmallest(count, (position for position in positions if after is None or position > after))


def _first_descending(positions: list[Position], after: Position | None, count: int) -> list[Position]:
    """The largest keys first; of equal keys the smaller id first."""
    if positions and len(positions[0]) == 1:
        return nlargest(count, (position for position in positions if after is None or position < after))
    ordered = sorted(positions, key=lambda position: (-position[0], position[1]))
    following = (
        position for position in ordered if after is None or (-position[0], position[1]) > (-after[0], after[1])
    )
    return [position for position, _ in zip(following, range(count), strict=False)]


def client_details(
    fleet: Fleet, record: ClientRecord, entries: Sequence[Numbered], needs: Iterable[Need] = ()
) -> pb.GetClientResponse:
    """The response without the client's work. entries: its history with numbers, oldest first; needs: attention."""
    client_id = record.client_id
    session, standing = fleet.sessions.of(client_id), None
    if (refusals := fleet.quarantine.refusals_of(client_id)) is not None:
        until = timestamp(refusals.until) if refusals.until else None
        standing = pb.Quarantine(refusals=refusals.refusals, reason=refusals.reason, until=until)
    return pb.GetClientResponse(
        client=client_status(fleet, record, needs),
        history=[history_entry(*entry) for entry in entries],
        session=_origin(session.origin if session is not None else None),
        standing=standing,
        **_contest(fleet.contested.contest_of(client_id)),
    )


def work_of(coordinator: Coordinator, client_id: str, run_id: str) -> str:
    """The client's current work, in words; empty without work."""
    try:
        run = coordinator.run(run_id)
    except NoSuchRun:
        return ""
    work = "has an assignment" if run.state.works(client_id) else "is reserved for it"
    return f"run {run_id}, round {run.state.round}, {run.state.phase.value}: {work}"


def not_drawn(runs: Iterable[Run], client_id: str) -> list[pb.NotDrawn]:
    """Why some runs do not draw the client; one that has ended, or may draw it or has, is left out."""
    open_runs = (run for run in runs if not run.ended and not run.state.works(client_id))
    reasons = ((run, run.eligible.why_not(run.state, client_id)) for run in open_runs)
    return [
        pb.NotDrawn(run_id=run.id, **why._asdict())
        for run, why in reasons
        if why is not None and not (run.context.hides_cohorts and why.reason in _OF_A_ROUND)
    ]


_OF_A_ROUND = {"refused", "failed", "drawn"}
"""Reasons why a client is not drawn again in a round that has drawn it."""


def _contest(contest: Contest | None) -> dict[str, Any]:
    """The fields of a client's response about two daemons under its identity."""
    if contest is None:
        return {}
    daemons = {"refused": _origin(contest.refused), "fenced": _origin(contest.fenced)}
    return {"conflicts": contest.conflicts, "contested": contest.flapping, **daemons}


def _origin(origin: Origin | None) -> pb.ClientOrigin | None:
    if origin is None:
        return None
    ends = None if origin.ends is None else timestamp(origin.ends)
    registered, serial = timestamp(origin.at), origin.serial
    return filled(pb.ClientOrigin, origin, registered=registered, certificate_serial=serial, certificate_end=ends)
