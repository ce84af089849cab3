"""Updates and failures of clients in the round under way: whether one is accepted, its verdict, and what follows.

A verdict is written to the ledger and acted on in one turn of the run's loop, so that the round cannot change in
between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice

import structlog

from fl_server.admission.client_rules import MaskedGate, registered_data
from fl_server.admission.gate import AdmissionGate, Collecting, build_gate
from fl_server.clients.quarantine import fault_of
from fl_server.rounds import effects
from fl_server.rounds import events as ev
from fl_server.run.client_states import refused_outcome
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.run.failures import MAX_NOTE, Failures, Reason
from fl_server.run.progress import Progress
from fl_server.store.errors import StoreFull
from fl_server.store.records import HistoryRecord, QuarantineRecord, UpdateRecord, Weighed
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey, RefusalReason, UpdateHeader

log = structlog.get_logger()


_NOT_WANTED: Mapping[str, RefusalReason | None] = {
    "": None,
    "late": RefusalReason.REFUSAL_REASON_LATE,
    "stale": RefusalReason.REFUSAL_REASON_STALE,
    "not assigned": RefusalReason.REFUSAL_REASON_NOT_ASSIGNED,
}
_CULPRITS: Mapping[str, RefusalReason] = {
    "not_finite": RefusalReason.REFUSAL_REASON_NOT_FINITE,
    "norm": RefusalReason.REFUSAL_REASON_RELATIVE_NORM,
    "": RefusalReason.REFUSAL_REASON_DIGEST,
}
"""Why an accepted update is refused, by the fault in `effects.DropCulprits`."""
MANY_WAITING = 8
"""Updates that wait for their verdicts, from which on they are decided together."""
MOST_TOGETHER = 100
"""Updates that are decided together: other events of the run need their turns too."""


class _Waiting:
    """A call that waits for the verdict on an update."""

    def __init__(self, update: UpdateRecord, header: UpdateHeader) -> None:
        self.update, self.header = update, header
        self.decided: asyncio.Future[UpdateRecord | None] = asyncio.get_running_loop().create_future()


class Submissions:
    """A run's decisions on what clients send. Lives on the event loop."""

    def __init__(self, context: RunContext, control: RunControl) -> None:
        self._context = context
        self._control = control
        self.failures = Failures(context, control)
        self.masked_bytes: Callable[[], int] = lambda: 0
        """Bytes of a masked update of the draw under way; the stages of secure aggregation put it here."""
        self._waiting: dict[_Waiting, None] = {}
        """Updates whose verdicts are not decided yet, in order of arrival."""

    def refusal_for(self, key: ExchangeKey, client: str) -> RefusalReason | None:
        """Why an update of the client for the exchange would not be accepted; None if it would."""
        reason = _NOT_WANTED[self._control.state.not_wanted((key.round, key.exchange), client)]
        if reason != RefusalReason.REFUSAL_REASON_LATE and self._context.fleet.records.banned(client):
            return RefusalReason.REFUSAL_REASON_BANNED
        return reason

    def refusal_of_update(self, header: UpdateHeader, client: str) -> RefusalReason | None:
        """`refusal_for` a given update. An update that was made before the round was redrawn is late."""
        state = self._control.state
        before = header.state_epoch < state.state_epoch
        redrawn = header.key.exchange or state.policy.secure  # an update of exchange 0 is of x_t, also after a redraw
        if before or (redrawn and header.attempt < state.first_attempt):
            return RefusalReason.REFUSAL_REASON_LATE
        return self.refusal_for(header.key, client)

    def works(self, key: ExchangeKey, client: str) -> bool:
        """Whether the client works for the exchange, so that a failure of it counts."""
        state = self._control.state
        place = (key.round, key.exchange) == state.place_of(client) and state.under_way
        return place and state.works(client) and not self._context.fleet.records.banned(client)

    def undecided(self, key: ExchangeKey, client: str) -> bool:
        """Whether an update of the exchange under way has no verdict yet, so that the ledger need not be asked.

        A verdict that is being written is not known here yet; `record_verdict` finds it.
        """
        return self._control.state.undecided((key.round, key.exchange), client)

    def gate(self, client: str) -> AdmissionGate | MaskedGate:
        """The checks that the update of a client's work must pass."""
        context, control = self._context, self._control
        registered = registered_data(control.eligible.offer_of(client))
        if self._control.state.policy.secure:
            return MaskedGate(self.masked_bytes())
        most = context.services.config.limits.max_update_mib << 20
        version, _ = control.state.place_of(client)
        collecting = Collecting(
            context.model.version(version).snapshot,
            control.state.exchange,
            control.state.state_epoch,
            context.norms,
            most,
        )
        return build_gate(context.model.engine, collecting, client, registered)

    async def record_verdict(self, update: UpdateRecord, header: UpdateHeader) -> UpdateRecord | None:
        """Write the verdict on an update and act on it in one turn. Returns the verdict that stands: the first one.

        Returns None if the update is late: the round may have been redrawn in the meantime, and then earlier updates
        do not count. Raises StoreFull while the run itself cannot write: the client should come again later.
        """
        if self._control.run_status.write_failure:
            raise StoreFull(self._control.run_status.write_failure)
        waiting = _Waiting(update, header)
        self._waiting[waiting] = None
        try:
            async with self._control.turn:
                if not waiting.decided.done():
                    await self._decide(self._taken_together(waiting))
        finally:
            self._waiting.pop(waiting, None)  # cancelled before its turn
        return await waiting.decided

    def _taken_together(self, first: _Waiting) -> list[_Waiting]:
        """The updates to decide in one turn: one, or many if many wait, for a transaction of many costs little more.

        No more than the round still needs: those behind them come too late.
        """
        together = [first]
        if len(self._waiting) >= MANY_WAITING:
            state = self._control.state
            most = max(1, min(MOST_TOGETHER, state.fills))
            together += islice((waiting for waiting in self._waiting if waiting is not first), most - 1)
        for submitted in together:
            self._waiting.pop(submitted, None)
        return together

    async def _decide(self, together: list[_Waiting]) -> None:
        """Write the verdicts and act on them. The caller holds the run's turn."""
        wanted: list[_Waiting] = []
        for submitted in together:
            if self.refusal_of_update(submitted.header, submitted.update.client_id) is None:
                wanted.append(submitted)
            else:
                submitted.decided.set_result(None)
        try:
            await self._write_and_act(wanted)
        except Exception as error:  # noqa: BLE001 - passed on to each of the calls
            for submitted in wanted:
                if not submitted.decided.done():
                    submitted.decided.set_exception(error)

    async def _write_and_act(self, wanted: list[_Waiting]) -> None:
        context = self._context
        updates = [submitted.update for submitted in wanted]
        weighed = [
            Weighed(update, *self._judged(update), self._control.eligible.package_of(update.client_id))
            for update in updates
        ]
        if len(weighed) == 1:
            verdicts = [await context.services.ledger.do(context.store.record_update, *weighed[0])]
        else:
            verdicts = await context.services.ledger.do(context.store.record_updates, weighed) if weighed else []
        changed = [
            update for update, *_, package in weighed if not update.admitted or update.delta is not None or package
        ]
        context.fleet.work.changed([update.client_id for update in changed])
        for submitted, (update, standing, why, _), verdict in zip(wanted, weighed, verdicts, strict=True):
            if standing is not None and verdict == update:
                context.fleet.keep_refusals(standing, why)
            await self._act(verdict, update)
            submitted.decided.set_result(verdict)

    def _judged(self, update: UpdateRecord) -> tuple[QuarantineRecord | None, HistoryRecord | None]:
        """What follows from an update for its client's quarantine."""
        if update.admitted:
            return None, None
        return self._context.fleet.quarantine.count_refusal(update, self._context.place_of(update.round))

    async def _act(self, verdict: UpdateRecord, update: UpdateRecord) -> None:
        """Act on the verdict on an update. It may be the one on another update of the client, which came before."""
        client, event = verdict.client_id, ev.UpdateAdmitted(((verdict.client_id, verdict.digest),))
        if verdict.admitted:
            if verdict.digest == update.digest and self._control.applies(event):
                await self._control.take(event)
            return
        refused = ev.UpdateRefused(client, fault_of(verdict.reason), verdict.detail)
        if self._control.applies(refused):
            if self._control.state.works(client):
                self._context.counters.assignment_refused(verdict.refused_for)
                self._report_out(client, "refused", f"update refused: {verdict.detail}")
            await self._control.take(refused)

    def client_gone(self, client: str, why: str) -> None:
        """A client is lost, banned or forgotten: it will not deliver."""
        if self._control.state.works(client):
            self._context.counters.assignments_ended("lost")
            if not self._context.hides_cohorts:
                self._context.fleet.work.count_lost(client)
            self._report_out(client, "lost", why)
            self._control.post(ev.ClientDroppedOut(client))

    async def client_failed(self, key: ExchangeKey, client: str, reason: Reason) -> bool:
        """A client reports that it cannot do its work. Returns False if no such work is wanted.

        The report takes effect before this returns, so that a repeat finds no work.
        """
        return await self._control.in_turn(self._take_reported(key, client, reason))

    async def _take_reported(self, key: ExchangeKey, client: str, reason: Reason) -> bool:
        if not self.works(key, client):
            return False
        await self.take_failure(client, reason)
        return True

    async def take_failure(self, client: str, reason: Reason) -> None:
        """An outstanding client will not deliver. The caller holds the run's turn."""
        event = ev.WorkFailed(client, reason.why, reason.cause, reason.not_finite)
        if self._control.applies(event):
            await self.record_failure(client, reason)
            await self._control.take(event)

    async def record_failure(self, client: str, reason: Reason) -> None:
        """Write that a client's work has failed, and report it."""
        await self.failures.add(client, reason)
        self._context.counters.assignments_ended("failed")
        self._report_out(client, "failed", reason.why)

    async def deadline_missed(self, effect: effects.DeadlineMissed) -> None:
        """Count a deadline that these clients missed, if they were attached, and give up those that are in quarantine.

        A client that is out already was cancelled with the round; the others go on in a further attempt.
        """
        fleet, outs = self._context.fleet, self._context.rounds.transfers.outs
        if not (late := tuple(client for client in effect.clients if fleet.attendance.attached(client))):
            return
        cancelled = (client for client in late if not self._control.state.works(client))
        outs.update(dict.fromkeys(cancelled, ("cancelled", "the deadline passed")))
        if self._context.hides_cohorts:
            return  # a quarantine would tell who was drawn, and depend on how many others delivered
        for client, why in await self.failures.add_missed_deadline(late):
            await fleet.records.write_note(client, why[:MAX_NOTE])
            if self._control.state.works(client):
                await self.record_failure(client, Reason(why))
                self._control.post(ev.WorkFailed(client, why))

    def _report_out(self, client: str, state: str, why: str) -> None:
        context = self._context
        context.rounds.transfers.outs[client] = state, why
        round_, info = self._control.state.round, context.cohort_log.info
        info("client_out", run=context.run_id, round=round_, client=client, state=state, why=why)
        context.watchers.publish(Progress("client_out", f"{client}: {why}"))

    # Accepted updates that are refused when the exchange is reduced.

    async def refuse_accepted(self, command: effects.DropCulprits) -> None:
        """Refuse accepted updates that spoil their round, then tell their clients.

        The ledger has the refusals, their effect on the clients' records, and the removal of the accepted list in one
        transaction. A coordinator that dies before it finds the same updates again.
        """
        context, control, why_of = self._context, self._control, dict(command.culprits)
        run_id, fleet = context.run_id, context.fleet
        updates = await control.read(context.store.accepted_updates, run_id, command.round, command.exchange)
        if not updates:
            return  # the list is removed already: this command was carried out, and then something failed
        reason = _CULPRITS[command.fault]
        refused = [
            replace(update, admitted=False, reason=RefusalReason.Name(reason), detail=why_of[update.client_id])
            for update in updates
            if update.client_id in why_of
        ]
        # Damaged bytes are not their client's fault.
        weighed = [self._judged(update) for update in refused if command.fault]
        whys = [
            HistoryRecord(
                time.time(),
                "coordinator",
                "culprit_dropped",
                run_id,
                f"round {command.round}{'' if context.hides_cohorts else f', {client}'}: {why}",
            )
            for client, why in command.culprits
        ]
        standings = [standing for standing, _ in weighed if standing is not None]
        quarantined = [why for _, why in weighed if why is not None]
        packages = {update.client_id: control.eligible.package_of(update.client_id) for update in refused}
        lines = [*whys, *quarantined]
        await control.write(context.store.refuse_accepted, refused, standings, lines, command.round, packages)
        fleet.work.changed([update.client_id for update in refused])
        for standing, why in weighed:
            if standing is not None:
                fleet.keep_refusals(standing, why)
        for update in refused:
            await self._accepted_was_refused(update, reason)

    async def _accepted_was_refused(self, update: UpdateRecord, reason: RefusalReason) -> None:
        context, client, word = self._context, update.client_id, update.refused_for
        context.counters.assignment_refused(word)
        warning = context.cohort_log.warning
        warning("culprit_dropped", run=context.run_id, round=update.round, client=client, why=update.detail)
        context.watchers.publish(Progress("client_out", f"{client}: {update.detail}"))
        context.rounds.transfers.outs[client] = "refused", f"update refused: {update.detail}"
        outcome = refused_outcome(update, reason, self._control.state.state_epoch)
        context.fleet.streams.push(client, pb.AttendResponse(outcome=outcome))
        await context.fleet.records.write_note(client, f"update refused ({word}): {update.detail}"[:300])
