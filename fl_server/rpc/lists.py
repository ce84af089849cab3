"""The lists of the Admin service, page by page: runs, clients, rounds, evaluations and history."""

from __future__ import annotations

from heapq import nsmallest

from fl_server.errors import InvalidInput
from fl_server.rpc.access.owners import OwnedRuns
from fl_server.rpc.pages import MOST_ENTRIES, PAGE_BYTES, Cursor, Entries, Page, Position
from fl_server.rpc.views import (
    client_evaluation,
    known_directions,
    not_loaded_status,
    round_summary,
    run_shown,
    shorten,
)
from fl_server.run.committed.lookup import committed_round
from fl_server.run.run import Run
from fl_server.runs.table import NotLoaded
from fl_server.services import Services
from protos.fl.v1 import admin_pb2 as pb


class Lists:
    """Answers the calls that list something."""

    def __init__(self, services: Services, runs: OwnedRuns) -> None:
        self._services, self._runs = services, runs

    async def runs(self, request: pb.ListRunsRequest) -> pb.ListRunsResponse:
        """All runs, the oldest first. A run that cannot be shown is listed with the reason."""
        cursor = Cursor.of_request(request, (float, str), "runs")
        runs, not_loaded = self._runs.loaded(), self._runs.not_loaded()
        keys: dict[Position, Run | NotLoaded] = {(run.record.created_at, run.id): run for run in runs}
        keys |= {(each.record.created_at, each.record.run_id): each for each in not_loaded}

        async def read(after: Position | None, count: int) -> Entries[pb.RunStatus]:
            following = (key for key in keys if after is None or key > after)
            return [(key, _shown(keys[key])) for key in nsmallest(count, following)]

        page = await cursor.page(read)
        return pb.ListRunsResponse(runs=page.entries, next_page_token=page.next_token)

    async def rounds(self, request: pb.ListRoundsRequest) -> pb.ListRoundsResponse:
        """The committed rounds of a run in order."""
        first, known = request.first_round, self._runs.problem(request.run_id)
        run_id = known.record.run_id if known is not None else self._runs.get(request.run_id).id
        cursor = Cursor.of_request(request, (int,), "rounds", run_id, first)
        page = await self._page_of_rounds(run_id, cursor, first)
        return pb.ListRoundsResponse(rounds=page.entries, next_page_token=page.next_token)

    async def all_rounds(self, run: Run) -> list[pb.RoundSummary]:
        """All committed rounds. Raises InvalidInput if one reply cannot hold them."""
        page = await self._page_of_rounds(run.id, Cursor((), MOST_ENTRIES, None), 0)
        if page.next_token:
            expected = f"a run of at most {MOST_ENTRIES:,} rounds that fit into one reply; ListRounds has pages"
            raise InvalidInput("with_rounds", expected, f"a run of {run.log.rounds:,} rounds")
        return page.entries

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
            round=round_summary(commit),
            evaluations=page.entries,
            next_page_token=page.next_token,
            lower_is_better=known_directions(run, {name for each in page.entries for name in each.metrics}),
        )


def _shown(run: Run | NotLoaded) -> pb.RunStatus:
    """The status of a run. One that fills a page alone is shortened."""
    status = run_shown(run) if isinstance(run, Run) else not_loaded_status(run)
    if status.ByteSize() > PAGE_BYTES:
        shorten(status)
    return status
