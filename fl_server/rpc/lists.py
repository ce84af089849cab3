"""The lists of the Admin service, page by page: runs, clients, rounds, evaluations and history."""

from __future__ import annotations

from dataclasses import replace
from heapq import nsmallest

from fl_server.coordinator.not_loaded import NotLoaded
from fl_server.errors import InvalidInput
from fl_server.rpc.access.owners import HIDDEN, OwnedRuns
from fl_server.rpc.pages import ENTRIES_AT_ONCE, MOST_ENTRIES, PAGE_BYTES, Cursor, Entries, Page, Position
from fl_server.rpc.views import (
    client_evaluation,
    client_status,
    history_entry,
    not_loaded_status,
    round_summary,
    run_shown,
    runs_listed,
    shorten,
)
from fl_server.runs.committed.lookup import committed_round
from fl_server.runs.run import Run
from fl_server.services import Services
from fl_server.store.records import ClientRecord
from protos.fl.v1 import admin_pb2 as pb

HISTORY_DEFAULT, HISTORY_MOST = 1000, 10_000
"""Entries of a call that names no number, and most entries in one reply."""
_SUBJECT_CHARS = 256
"""Longer than any id."""


class Lists:
    """Answers the calls that list something."""

    def __init__(self, services: Services, runs: OwnedRuns) -> None:
        self._services, self._runs = services, runs

    async def runs(self, request: pb.ListRunsRequest) -> pb.ListRunsResponse:
        """All runs, the oldest first. A run that cannot be shown is listed with the reason."""
        cursor = Cursor.of_request(request, (float, str), "runs")
        runs, not_loaded = self._runs.loaded(), self._runs.not_loaded()
        if not cursor.size:
            cursor.require(fits=(listed := runs_listed(runs, not_loaded)))
            return pb.ListRunsResponse(runs=listed)
        keys: dict[Position, Run | NotLoaded] = {(run.record.created_at, run.id): run for run in runs}
        keys |= {(each.record.created_at, each.record.run_id): each for each in not_loaded}

        async def read(after: Position | None, count: int) -> Entries[pb.RunStatus]:
            following = (key for key in keys if after is None or key > after)
            return [(key, _shown(keys[key])) for key in nsmallest(count, following)]

        page = await cursor.page(read)
        return pb.ListRunsResponse(runs=page.entries, next_page_token=page.next_token)

    async def clients(self, request: pb.ListClientsRequest) -> pb.ListClientsResponse:
        """Clients in the order of id bytes."""
        state, labels = request.state, dict(request.labels)
        cursor = Cursor.of_request(request, (str,), "clients", state, labels)
        services, fleet = self._services, self._services.fleet
        if state not in pb.ClientState.values():
            raise InvalidInput("state", f"one of {', '.join(pb.ClientState.keys())}", state)
        name = pb.ClientState.Name(state).removeprefix("CLIENT_STATE_").lower() if state else ""

        async def read(after: Position | None, count: int) -> Entries[pb.ClientStatus]:
            wanted = (
                client
                for client, record in fleet.records.in_memory().items()
                if (after is None or client > after[0])
                and (not name or fleet.state(client) == name)
                and labels.items() <= record.labels.items()
            )
            # The ledger has the counters.
            records = await services.ledger.do(services.ledger.store.clients_of, nsmallest(count, wanted))
            return [((record.client_id,), self._client(record)) for record in records]

        page = await cursor.page(read)
        return pb.ListClientsResponse(clients=page.entries, next_page_token=page.next_token)

    def _client(self, record: ClientRecord) -> pb.ClientStatus:
        status = client_status(self._services.fleet, record)
        if self._runs.hides(status.run_id):
            status.run_id = HIDDEN
        return status

    async def rounds(self, request: pb.ListRoundsRequest) -> pb.ListRoundsResponse:
        """The committed rounds of a run in order."""
        first, known = request.first_round, self._runs.problem(request.run_id)
        run_id = known.record.run_id if known is not None else self._runs.get(request.run_id).id
        cursor = Cursor.of_request(request, (int,), "rounds", run_id, first)
        if not cursor.size:  # this call is not older than pages
            cursor = replace(cursor, size=MOST_ENTRIES)
        page = await self._page_of_rounds(run_id, cursor, first)
        return pb.ListRoundsResponse(rounds=page.entries, next_page_token=page.next_token)

    async def all_rounds(self, run: Run) -> list[pb.RoundSummary]:
        """All committed rounds. Raises InvalidInput if one reply cannot hold them."""
        try:
            return (await self._page_of_rounds(run.id, Cursor((), 0, None), 0)).entries
        except InvalidInput as error:
            expected = "a run whose rounds fit into one reply; ListRounds has pages, and `fl` of its version uses them"
            raise InvalidInput("with_rounds", expected, f"a run of {run.log.rounds:,} rounds") from error

    async def _page_of_rounds(self, run_id: str, cursor: Cursor, first: int) -> Page[pb.RoundSummary]:
        store = self._services.ledger.store

        async def read(after: Position | None, count: int) -> Entries[pb.RoundSummary]:
            begin = first if after is None else max(first, after[0] + 1)
            commits = await self._services.ledger.do(store.commits, run_id, begin, count)
            return [((commit.round,), round_summary(commit)) for commit in commits]

        return await cursor.page(read)

    async def evaluations(self, request: pb.ListEvaluationsRequest) -> pb.ListEvaluationsResponse:
        """The clients' evaluations of a committed model, in the order of id bytes."""
        run = self._runs.get(request.run_id)
        asked = request.round if request.HasField("round") else None
        cursor = Cursor.of_request(request, (int, str), "evaluations", run.id, asked)
        round_ = cursor.after[0] if cursor.after else run.client_evaluations.newest() if asked is None else asked
        if round_ is None:
            raise InvalidInput(
                "round", "a run whose clients have evaluated a model: evaluation.clients_every", "none has"
            )
        if (commit := await committed_round(run.context, round_)) is None:
            raise InvalidInput("round", f"one of the {run.log.rounds} committed rounds", round_)
        ledger = self._services.ledger

        async def read(after: Position | None, count: int) -> Entries[pb.ClientEvaluation]:
            answers = await ledger.do(ledger.store.evaluations, run.id, round_, after[1] if after else "", count)
            return [((round_, answer.client_id), client_evaluation(answer)) for answer in answers]

        page = await cursor.page(read)
        return pb.ListEvaluationsResponse(
            round=round_summary(commit), evaluations=page.entries, next_page_token=page.next_token
        )

    async def history(self, request: pb.ListHistoryRequest) -> pb.ListHistoryResponse:
        """Rows of the history, oldest first."""
        subject, limit = request.subject[:_SUBJECT_CHARS], request.limit or HISTORY_DEFAULT
        cursor = Cursor.of_request(request, (int, int), "history", subject, limit)
        if not cursor.size and limit > HISTORY_MOST:
            raise InvalidInput("limit", f"at most {HISTORY_MOST:,} entries in one reply", f"{limit:,}; use page_size")
        if self._runs.hides(subject):
            return pb.ListHistoryResponse()  # as for a subject without entries
        ledger = self._services.ledger
        if cursor.after is None:
            begin, last = await ledger.do(ledger.store.history_span, subject, limit)
        else:  # entries that came after the first page are not listed
            begin, last = cursor.after

        async def read(after: Position | None, count: int) -> Entries[pb.HistoryEntry]:
            first, seen = after[0] + 1 if after else begin, list[tuple[Position, pb.HistoryEntry]]()
            at_once = count if self._runs.all_seen else ENTRIES_AT_ONCE
            while len(seen) < count:  # entries that the caller may not see are passed over
                entries = await ledger.do(ledger.store.history_between, subject, (first, last), at_once)
                shown = ((number, entry) for number, entry in entries if not self._runs.hides_entry(entry))
                seen += [((number, last), history_entry(entry)) for number, entry in shown]
                if len(entries) < at_once:
                    break
                first = entries[-1][0] + 1
            return seen[:count]

        page = await cursor.page(read)
        return pb.ListHistoryResponse(entries=page.entries, next_page_token=page.next_token)


def _shown(run: Run | NotLoaded) -> pb.RunStatus:
    """The status of a run. One that fills a page alone is shortened."""
    status = run_shown(run) if isinstance(run, Run) else not_loaded_status(run)
    if status.ByteSize() > PAGE_BYTES:
        shorten(status)
    return status
