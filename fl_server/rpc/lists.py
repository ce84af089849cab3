"""The lists of the Admin service, page by page: runs, rounds, a round's cohort, evaluations and history.

A run that is created is in the coordinator's table before its first entry of history is read here: the table is filled
when the ledger's call returns, and this reads with a later call. So the owner of an entry's run is always known.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from heapq import nsmallest
from typing import Any

import grpc.aio

from fl_common.units import counted
from fl_server.errors import InvalidInput
from fl_server.pages import ENTRIES_AT_ONCE, MOST_ENTRIES, PAGE_BYTES, Cursor, Entries, Page, Position
from fl_server.rpc.access import OperatorCalls
from fl_server.rpc.views import (
    client_evaluation,
    history_entry,
    known_directions,
    not_loaded_status,
    round_summary,
    run_shown,
    shorten,
)
from fl_server.run.run import Run
from fl_server.run.status import Member, by_phase, drawn, members
from fl_server.runs.table import NotLoaded
from protos.digests import digest_bytes
from protos.fl.v1 import admin_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]
HISTORY_DEFAULT, HISTORY_MOST = 1000, 10_000
"""Entries of a call that names no number, and most entries in one reply."""
_SUBJECT_CHARS = 256
"""Longer than any id."""
_LARGEST = 2**63 - 1


class ListCalls(OperatorCalls):
    """The lists of runs and of what belongs to one run."""

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        """All runs, the oldest first. A run that cannot be shown is listed with the reason."""
        cursor = Cursor.of_request(request, (float, str), "runs")
        runs, not_loaded = self._runs.loaded(), self._runs.not_loaded()
        keys: dict[Position, Run | NotLoaded] = {(run.record.created_at, run.id): run for run in runs}
        keys |= {(run.record.created_at, run.record.run_id): run for run in not_loaded}

        async def read(after: Position | None, count: int) -> Entries[pb.RunStatus]:
            following = (key for key in keys if after is None or key > after)
            return [(key, _shown(keys[key])) for key in nsmallest(count, following)]

        page = await cursor.page(read)
        return pb.ListRunsResponse(runs=page.entries, next_page_token=page.next_token)

    async def ListRounds(self, request: pb.ListRoundsRequest, context: Context) -> pb.ListRoundsResponse:
        """The committed rounds of a run in order."""
        first, known = request.first_round, self._runs.problem(request.run_id)
        run_id = known.record.run_id if known is not None else self._runs.get(request.run_id).id
        cursor = Cursor.of_request(request, (int,), "rounds", run_id, first)
        page = await self._page_of_rounds(run_id, cursor, first)
        return pb.ListRoundsResponse(rounds=page.entries, next_page_token=page.next_token)

    async def _all_rounds(self, run: Run) -> list[pb.RoundSummary]:
        """All committed rounds. Raises InvalidInput if one reply cannot hold them."""
        page = await self._page_of_rounds(run.id, Cursor((), MOST_ENTRIES, None), 0)
        if page.next_token:
            expected = f"a run of at most {MOST_ENTRIES:,} rounds that fit into one reply; ListRounds has pages"
            raise InvalidInput("with_rounds", expected, f"a run of {counted(run.rounds.committed, 'round')}")
        return page.entries

    async def _page_of_rounds(self, run_id: str, cursor: Cursor, first: int) -> Page[pb.RoundSummary]:
        store, hidden = self._services.ledger.store, self._runs.hides_cohorts(run_id)

        async def read(after: Position | None, count: int) -> Entries[pb.RoundSummary]:
            begin = first if after is None else max(first, after[0] + 1)
            commits = await self._services.ledger.do(store.commits, run_id, begin, count)
            return [((commit.round,), round_summary(commit, hidden=hidden)) for commit in commits]

        return await cursor.page(read)

    async def ListCohort(self, request: pb.ListCohortRequest, context: Context) -> pb.ListCohortResponse:
        """A page of the clients of the round under way."""
        return await cohort_page(self._runs.get(request.run_id), request)

    async def ListEvaluations(self, request: pb.ListEvaluationsRequest, context: Context) -> pb.ListEvaluationsResponse:
        """The clients' evaluations of a committed model, in the order of id bytes."""
        run = self._runs.get(request.run_id)
        asked = request.round if request.HasField("round") else None
        cursor = Cursor.of_request(request, (int, str), "evaluations", run.id, asked)
        round_ = cursor.after[0] if cursor.after else run.client_evaluations.newest() if asked is None else asked
        if round_ is None:
            expected = "a run whose clients have evaluated a model: evaluation.clients_every"
            raise InvalidInput("round", expected, "none has")
        if (commit := await run.context.commit_of(round_)) is None:
            raise InvalidInput("round", f"a committed round, of which there are {run.rounds.committed}", round_)
        ledger = self._services.ledger

        async def read(after: Position | None, count: int) -> Entries[pb.ClientEvaluation]:
            answers = await ledger.do(ledger.store.evaluations, run.id, round_, after[1] if after else "", count)
            return [((round_, answer.client_id), client_evaluation(answer)) for answer in answers]

        page = await cursor.page(read)
        return pb.ListEvaluationsResponse(
            round=round_summary(commit, hidden=run.context.hides_cohorts),
            evaluations=page.entries,
            next_page_token=page.next_token,
            lower_is_better=known_directions(run, {name for evaluation in page.entries for name in evaluation.metrics}),
        )


def _shown(run: Run | NotLoaded) -> pb.RunStatus:
    """The status of a run. One that fills a page alone is shortened."""
    status = run_shown(run) if isinstance(run, Run) else not_loaded_status(run)
    if status.ByteSize() > PAGE_BYTES:
        shorten(status)
    return status


class HistoryCalls(OperatorCalls):
    """The calls for the history."""

    async def ListHistory(self, request: pb.ListHistoryRequest, context: Context) -> pb.ListHistoryResponse:
        """A page of entries, oldest first."""
        subject, limit = request.subject[:_SUBJECT_CHARS], request.limit or HISTORY_DEFAULT
        before = _number("before_number", request.before_number)
        cursor = Cursor.of_request(request, (int, int), "history", subject, limit, before)
        if self._runs.hides(subject):
            return pb.ListHistoryResponse()  # as for a subject without entries
        ledger, is_first = self._services.ledger, cursor.after is None
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

    async def WatchHistory(
        self, request: pb.WatchHistoryRequest, context: Context
    ) -> AsyncGenerator[pb.WatchHistoryResponse, None]:
        """The entries after a number, then new ones, without end."""
        subject = request.subject[:_SUBJECT_CHARS]
        after = _number("after_number", request.after_number) if request.HasField("after_number") else None
        is_first = True
        async with aclosing(self._services.ledger.history.after(after, subject)) as batches:
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


async def cohort_page(run: Run, request: pb.ListCohortRequest) -> pb.ListCohortResponse:
    """A page of the clients of the round under way, in the order of id. Raises InvalidInput, also if it is hidden."""
    if run.context.hides_cohorts:
        expected = "a run without privacy of clients, whose draws are secret (docs/security/privacy.md)"
        raise InvalidInput("run_id", expected, run.id)
    state, transfers, clients = run.state, run.rounds.transfers, drawn(run.state)
    equipped = _equipped(run, clients)
    cursor = Cursor.of_request(request, (str,), "cohort", run.id)

    async def read(after: Position | None, count: int) -> Entries[pb.CohortMember]:
        following = [client for client in clients if after is None or client > after[0]][:count]
        return [((member.client,), _message(member)) for member in members(state, transfers, equipped, following)]

    page = await cursor.page(read)
    return pb.ListCohortResponse(
        members=page.entries, next_page_token=page.next_token, round=state.round, exchange=state.exchange,
        by_phase=by_phase(state, transfers, equipped),
    )  # fmt: skip


def _equipped(run: Run, clients: Sequence[str]) -> frozenset[str]:
    """The clients whose present processes were sent all that the exchange needs, for whatever run or round it was."""
    needed = {digest_bytes(broadcast.resource.digest) for broadcast in run.model.broadcasts}
    sessions = ((client, run.context.fleet.sessions.of(client)) for client in clients if needed)
    return frozenset(client for client, session in sessions if session is not None and needed <= session.sent.keys())


def _message(member: Member) -> pb.CohortMember:
    message = pb.CohortMember(client_id=member.client, phase=member.phase, detail=member.detail)
    if member.transfer is not None and member.moving:
        message.done_bytes, message.size_bytes = member.transfer.done, member.transfer.size
    if member.seconds is not None:
        message.phase_s = member.seconds
    return message
