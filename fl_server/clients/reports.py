"""What clients report with ReportStatus: whether they may train, and which work they give up, and why.

Each report of a call is acted on by itself: one that is refused keeps none of the others from its effect. A client is
taken out of the round whatever reason it gives, also one that this version does not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from fl_server.errors import InvalidInput, NoSuchRun
from fl_server.registration import check_availability
from fl_server.runs.lost_states import NoSuchLoss, state_lost
from fl_server.store.base import StoreFull
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.coordinator_pb2 import FailureReason
from protos.fl.v1.training_pb2 import RefusalReason
from protos.wire import known_name

if TYPE_CHECKING:
    from fl_server.coordinator import Coordinator
    from fl_server.parts import Parts
    from fl_server.run import Run

log = structlog.get_logger()

MAX_FAILURES = 64
"""In one call."""
MAX_CHARS = 1000
"""Of a failure's message; the rest is cut off."""
MAX_NOTE = 300


class Reports:
    """Acts on the reports of all clients. Lives on the event loop."""

    def __init__(self, parts: Parts, coordinator: Coordinator) -> None:
        self._parts = parts
        self._coordinator = coordinator

    async def take(self, client: str, request: pb.ReportStatusRequest) -> None:
        """Act on a call. Raises InvalidInput for the first of its failures that is refused, behind all of them."""
        if len(request.failures) > MAX_FAILURES:
            raise InvalidInput("failures", f"{MAX_FAILURES} at most", f"{len(request.failures)}")
        check_availability(request.availability)
        if request.HasField("availability"):
            self._parts.fleet.workforce.set_availability(client, request.availability)
        refused: list[InvalidInput] = []
        for number, failure in enumerate(request.failures):
            try:
                await self._failure(client, failure)
            except NoSuchRun as error:
                self._refused("unknown_run")
                refused.append(InvalidInput(f"failures[{number}].key.run_id", "a run of this coordinator", error))
            except NoSuchLoss as error:
                self._refused("no_state")
                refused.append(InvalidInput(f"failures[{number}].reason", str(error), "STATE_LOST"))
        if refused:
            raise refused[0]

    async def _failure(self, client: str, failure: pb.WorkFailure) -> None:
        run, why = self._coordinator.run(failure.key.run_id), failure.message[:MAX_CHARS]
        if run.cannot_write:
            raise StoreFull(run.cannot_write)  # the client had better come again than wait with the run
        if failure.reason == pb.FAILURE_REASON_STATE_LOST:
            await state_lost(run, client, failure.key, why[:MAX_NOTE])
            return
        reason = known_name(FailureReason, failure.reason).removeprefix("FAILURE_REASON_").lower()
        words, finite = f"{reason}: {why}", failure.reason != pb.FAILURE_REASON_NOT_FINITE
        evaluates = run.client_evaluations.failed(failure.key, client)
        works = await run.intake.client_failed(failure.key, client, words, finite=finite)
        if not (evaluates or works):
            late = run.intake.refusal(failure.key, client) == RefusalReason.REFUSAL_REASON_LATE
            self._refused("late" if late else "not_assigned")
            return
        # Once for each piece of work, for it is given up only once.
        log.warning("client_failed", run=run.id, round=failure.key.round, client=client, why=words)
        await self._parts.fleet.note(client, words[:MAX_NOTE])
        if works:
            await self._count(run, client, f"run {run.id} round {failure.key.round} ({words[:MAX_NOTE]})")

    async def _count(self, run: Run, client: str, what: str) -> None:
        """Failures in a row count towards quarantine."""
        fleet, ledger = self._parts.fleet, self._parts.ledger
        standing, quarantined = fleet.quarantine.weigh_failure(client, what)
        if standing is not None:
            await ledger.insist(run.no_room, ledger.store.put_standing, standing, quarantined)
            fleet.keep_standing(standing, quarantined)

    def _refused(self, reason: str) -> None:
        self._parts.metrics.reports_refused.labels(reason).inc()
