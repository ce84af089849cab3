"""Client states that are gone: reports of clients that have lost theirs.

If the server keeps the states' sum, all clients restart in the next state epoch. That costs every client, so one
client can cause it only so often: the report must be about an assignment that named a state, it counts towards
quarantine, a client that reports it too often is left out of the run, and some rounds are committed between two
restarts, which the round state machine counts. Everything that these rules need is in the ledger.
"""

from __future__ import annotations

import time

import structlog

from fl_common.units import counted
from fl_server.rounds import events as ev
from fl_server.run.client_states import LossReport
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.run.failures import Reason
from fl_server.run.submissions import Submissions
from fl_server.store.records import ClientStateRecord, HistoryRecord
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey, RefusalReason

log = structlog.get_logger()


class InvalidLossReport(Exception):
    """A report of a lost state that the client cannot have had. `str()` completes "expected ..., got STATE_LOST"."""


class LostStates:
    """Handles the reports of one run. Lives on the event loop."""

    def __init__(self, context: RunContext, control: RunControl, submissions: Submissions) -> None:
        self._context, self._control, self._submissions = context, control, submissions

    async def report(self, client: str, key: ExchangeKey, why: str) -> None:
        """Act on a report for the round under way.

        Raises InvalidLossReport, after the report was counted as a fault; no state was changed then.
        """
        await self._control.in_turn(self._report(client, key, why))

    async def _report(self, client: str, key: ExchangeKey, why: str) -> None:
        states = self._context.client_states
        if not await self._is_at_work(client, key, why):
            return
        if states.counted(client) is None:
            if states.excused(client):
                states.use_excuse(client)
                return  # the assignment that it has by now names no state, and it will answer that one too
            await self._count_fault(client, why)
            await self._submissions.take_failure(
                client, Reason(f"state_lost, and its assignment named no state: {why}")
            )
            raise InvalidLossReport("another reason, because the assignment named no client state")
        state = self._control.state
        lost = await self._record(LossReport(client, self._control.state.state_epoch, state.round, why))
        await self._act(lost)

    async def _is_at_work(self, client: str, key: ExchangeKey, why: str) -> bool:
        """Whether the report is about wanted work. Raises InvalidLossReport for work that the client cannot have."""
        state = self._control.state
        if self._submissions.works(key, client):  # in a stage before the updates, too
            return True
        reason = self._submissions.refusal_for(key, client)
        if reason == RefusalReason.REFUSAL_REASON_LATE and (key.round, key.exchange) <= (state.round, state.exchange):
            return False  # a late report is no fault
        if reason == RefusalReason.REFUSAL_REASON_BANNED:
            return False
        if client in state.out or self._context.client_states.excused(client):
            return False  # the report came twice, or the work was cancelled in the meantime
        await self._count_fault(client, why)
        raise InvalidLossReport("the client to be at work for that round")

    async def _record(self, report: LossReport) -> ClientStateRecord:
        """Write a loss and its effect on the client's record; a repeat is written once."""
        context, client = self._context, report.client
        states, fleet, run_id = context.client_states, context.fleet, context.run_id
        before, now = states.standing(client), states.after_loss(report)
        if now == before:
            return now
        standing, quarantined = fleet.quarantine.count_lost_state(client, f"{self._where()} (state_lost): {report.why}")
        whys = [
            HistoryRecord(
                time.time(), f"client:{client}", "state_lost", run_id,
                f"round {report.round}, the {_nth(now.losses)} time: {report.why}",
            ),
            *([] if quarantined is None else [quarantined]),
        ]  # fmt: skip
        if out := states.lost_too_often(now):
            whys.append(HistoryRecord(time.time(), "coordinator", "client_left_out", client, self._left_out(now)))
        await self._control.write(context.store.put_client_state_records, [now], standing, whys)
        states.keep([now])
        context.metrics.states_lost.labels(run_id).inc()
        log.warning("state_lost", run=run_id, round=report.round, client=client, losses=now.losses, why=report.why)
        if standing is not None:
            fleet.keep_refusals(standing, quarantined)
        if out:
            await self._notify_left_out(now)
        else:
            await fleet.records.write_note(client, f"state_lost in run {run_id} round {report.round}: {report.why}")
        return now

    async def _act(self, lost: ClientStateRecord) -> None:
        """Let the run decide: all states restart, this one does, or the run continues without the client."""
        context, control, client = self._context, self._control, lost.client_id
        if out := client in context.client_states.left_out:
            await control.refresh_roster()  # or it could be drawn when the round is redrawn
        if not context.algorithm.needs_population:
            context.client_states.restart_one(client)
        await control.take(ev.StateLost(client, lost.reason, out))

    async def _count_fault(self, client: str, why: str) -> None:
        """Count an invalid report against the client. While the client is quarantined nothing more is written."""
        context, fleet = self._context, self._context.fleet
        if fleet.quarantine.of(client) is not None:
            return
        standing, quarantined = fleet.quarantine.count_lost_state(
            client, f"{self._where()} (state_lost of no state): {why}"
        )
        if standing is not None:
            round_ = self._control.state.round
            await self._control.write(context.store.put_quarantine_record, standing, quarantined)
            log.warning("state_lost_refused", run=context.run_id, round=round_, client=client, why=why)
            fleet.keep_refusals(standing, quarantined)
            await fleet.records.write_note(
                client, f"state_lost in run {context.run_id} round {round_}, of no state: {why}"
            )

    async def _notify_left_out(self, lost: ClientStateRecord) -> None:
        why, client, fleet = self._left_out(lost), lost.client_id, self._context.fleet
        log.warning("client_left_out", run=self._context.run_id, client=client, losses=lost.losses)
        notice = pb.Notice(text=f"the coordinator gives this client no work {why}")
        fleet.streams.push(client, pb.AttendResponse(notice=notice))
        await fleet.records.write_note(client, f"gets no work {why}")

    def _left_out(self, lost: ClientStateRecord) -> str:
        return (
            f"of run {self._context.run_id}: it lost its state {counted(lost.losses, 'time')}, the last time in round "
            f"{lost.lost_round}; `fl clients release {lost.client_id}` ends that"
        )

    def _where(self) -> str:
        return f"the last one in run {self._context.run_id} round {self._control.state.round}"


def _nth(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
