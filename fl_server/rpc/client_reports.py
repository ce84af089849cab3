"""ReportStatus: a client's availability, and the work that it gives up, with the reason.

Each failure in a call takes effect by itself: a refused one does not stop the others. A client is taken out of the
round for any reason, also one that this version does not know. Work that a site's policy refuses does not count
towards quarantine; the run draws the client no more.
"""

from __future__ import annotations

import structlog

from fl_server.audit.writer import AuditRecord
from fl_server.clients.eligibility import Work
from fl_server.clients.registration_request import check_availability
from fl_server.errors import InvalidInput, NoSuchRun
from fl_server.identity import address
from fl_server.run.failures import MAX_NOTE, Reason
from fl_server.run.lost_states import InvalidLossReport
from fl_server.run.run import Run
from fl_server.runs.coordinator import Coordinator
from fl_server.services import Services
from fl_server.store.errors import StoreFull
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.coordinator_pb2 import FailureReason
from protos.fl.v1.training_pb2 import RefusalReason
from protos.wire import known_name

log = structlog.get_logger()

MAX_FAILURES = 64
"""Most failures in one call."""
MAX_CHARS = 1000
"""Characters of a failure's message that are used."""
MAX_TYPE, MAX_PLACE = 100, 200
"""Characters of an error's type and place that are used."""


class Reports:
    """Handles the reports of all clients. Lives on the event loop."""

    def __init__(self, services: Services, coordinator: Coordinator) -> None:
        self._services = services
        self._coordinator = coordinator

    async def take(self, client: str, request: pb.ReportStatusRequest) -> None:
        """Handle a call: every failure is taken, refused, or left for a repeat of the call.

        Raises the first error that is not the client's, such as StoreFull, otherwise InvalidInput for the first
        refused failure. A repeat of the call is harmless: what took effect is late or not assigned then.
        """
        if len(request.failures) > MAX_FAILURES:
            raise InvalidInput("failures", f"{MAX_FAILURES} at most", f"{len(request.failures)}")
        check_availability(request.availability)
        if request.HasField("availability"):
            self._services.fleet.eligibility.set_availability(client, request.availability)
        refused: list[InvalidInput] = []
        faults: list[Exception] = []
        for number, failure in enumerate(request.failures):
            try:
                await self._failure(client, failure)
            except NoSuchRun as error:
                self._refused("unknown_run")
                refused.append(InvalidInput(f"failures[{number}].key.run_id", "a run of this coordinator", error))
            except InvalidLossReport as error:
                self._refused("no_state")
                refused.append(InvalidInput(f"failures[{number}].reason", str(error), "STATE_LOST"))
            except Exception as error:  # noqa: BLE001 - an error in one run must not block reports to the others
                faults.append(error)
        if problems := [*faults, *refused]:
            raise problems[0]

    async def _failure(self, client: str, failure: pb.WorkFailure) -> None:
        run, why = self._run(failure.key.run_id), failure.message[:MAX_CHARS]
        if run.run_status.write_failure:
            raise StoreFull(run.run_status.write_failure)  # the client tries again, instead of waiting with the run
        if failure.reason == pb.FAILURE_REASON_STATE_LOST:
            await run.lost_states.report(client, failure.key, why[:MAX_NOTE])
            return
        reason = known_name(FailureReason, failure.reason).removeprefix("FAILURE_REASON_").lower()
        by_policy = failure.reason == pb.FAILURE_REASON_POLICY
        why = why.removeprefix("policy: ") if by_policy else why
        words, not_finite = f"{reason}: {why}", failure.reason == pb.FAILURE_REASON_NOT_FINITE
        evaluates = run.client_evaluations.client_failed(failure.key, client)
        wanted = evaluates or run.submissions.works(failure.key, client)
        if by_policy and wanted:  # a repeated report must not make the run check all clients
            await self._refused_by_policy(run, client, "evaluation" if evaluates else "training", why[:MAX_NOTE])
        reason_here = Reason(words, "" if by_policy else _cause(failure), not_finite)
        works = await run.submissions.client_failed(failure.key, client, reason_here)
        if not (evaluates or works):
            late = run.submissions.refusal_for(failure.key, client) == RefusalReason.REFUSAL_REASON_LATE
            self._refused("late" if late else "not_assigned")
            return
        # Logged once for each assignment, because it can be given up only once.
        run.context.cohort_log.warning("client_failed", run=run.id, round=failure.key.round, client=client, why=words)
        if works and not by_policy:  # a site's policy is no fault of its client
            await run.submissions.failures.count(client, words)
        else:
            await self._services.fleet.records.write_note(client, words[:MAX_NOTE])

    def _run(self, run_id: str) -> Run:
        """The run of a failure. Raises NotNow while it is being loaded, and NoSuchRun if nothing loads it now.

        Such a run asks for the work again when another start loads it, and other runs' failures do not wait for it.
        """
        waiting = self._coordinator.table.not_loaded.get(run_id)
        if waiting is not None and not waiting.loading:
            return self._coordinator.run(run_id)
        return self._coordinator.run_of_call(run_id)

    async def _refused_by_policy(self, run: Run, client: str, kind: Work, why: str) -> None:
        """Draw the client no more for this work, before anything else is drawn in its place."""
        record = AuditRecord(f"client:{client}", address.get(), "policy_refused", run.id, "refused", why)
        self._services.audit.record_refusal(record)
        self._services.fleet.eligibility.refused_by_policy(client, run.id, kind, why)
        await run.in_turn(run.refresh_roster())

    def _refused(self, reason: str) -> None:
        self._services.metrics.reports_refused.labels(reason).inc()


def _cause(failure: pb.WorkFailure) -> str:
    """What failures of different clients have in common; empty where the task's own code raised nothing.

    An error of what that code returned, such as a loss that is no tensor, has no line. Its message is the same.
    """
    kind, place = failure.error_type[:MAX_TYPE], (failure.place or failure.message)[:MAX_PLACE]
    return f"{kind} ({place})" if kind else ""
