"""Updates and failures of clients in the round under way: whether one is accepted, its verdict, and what follows.

A verdict is written to the ledger and acted on in one turn of the run's loop, so that the round cannot change in
between.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import islice

import structlog

from fl_server.admission.expected_work import registered_data
from fl_server.admission.gate import AdmissionGate
from fl_server.admission.round_gate import Collecting, build_gate
from fl_server.errors import model_of
from fl_server.rounds import effects
from fl_server.rounds import events as ev
from fl_server.runs.context import RunContext
from fl_server.runs.control import RunControl
from fl_server.runs.failures import MAX_NOTE, Failures, Reason
from fl_server.runs.outcomes import refused_outcome
from fl_server.runs.progress import Progress
from fl_server.store.errors import StoreFull
from fl_server.store.protocol import Weighed
from fl_server.store.records import HistoryRecord, UpdateRecord
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey, RefusalReason, UpdateHeader

log = structlog.get_logger()


LAYOUT = RefusalReason.Name(RefusalReason.REFUSAL_REASON_LAYOUT)
"""The reason of a refusal, as the ledger has it."""
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
        self.refused: set[str] = set()
        """Clients with a refused update in this round. The refusal stands, so they are not drawn for it again."""
        self.not_finite: dict[str, str] = {}
        """Clients that got a NaN or an infinity in this round, or whose update alone made a sum overflow, and why."""
        self.norm_refused: set[str] = set()
        """Clients with an update of this round that was refused because of its norm."""
        self.layout_refused: dict[str, str] = {}
        """Clients with an update of this round that was refused because of its layout, and why."""
        self.failures = Failures(context, control)
        self._waiting: dict[_Waiting, None] = {}
        """Updates whose verdicts are not decided yet, in order of arrival."""

    def refusal_for(self, key: ExchangeKey, client: str) -> RefusalReason | None:
        """Why an update of the client for the exchange would not be accepted; None if it would."""
        state = self._control.state
        if not state.collects or (key.round, key.exchange) != (state.round, state.exchange):
            return RefusalReason.REFUSAL_REASON_LATE
        if self._context.fleet.banned(client):
            return RefusalReason.REFUSAL_REASON_BANNED
        return None if client in state.drawn else RefusalReason.REFUSAL_REASON_NOT_ASSIGNED

    def refusal_of_update(self, header: UpdateHeader, client: str) -> RefusalReason | None:
        """`refusal_for` a given update. An update that was made before the round was redrawn is late."""
        before = header.state_epoch < self._control.record.state_epoch
        if before or (header.key.exchange and header.attempt < self._control.state.first_attempt):
            return RefusalReason.REFUSAL_REASON_LATE
        return self.refusal_for(header.key, client)

    def undecided(self, key: ExchangeKey, client: str) -> bool:
        """Whether an update of the exchange under way has no verdict yet, so that the ledger need not be asked.

        A verdict that is being written is not known here yet; `record_verdict` finds it.
        """
        state = self._control.state
        if not state.collects or (key.round, key.exchange) != (state.round, state.exchange):
            return False
        return client not in self.refused and not state.arrivals.has(client)

    def gate(self, client: str) -> AdmissionGate:
        """The checks that a client's update of the round under way must pass."""
        context, control = self._context, self._control
        registered = registered_data(context.fleet.known(client), context.task)
        most = context.services.config.limits.max_update_mib << 20
        collecting = Collecting(
            context.model.snapshot, control.state.exchange, control.record.state_epoch, context.norms, most
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
        verdict = await waiting.decided
        if verdict is not None and not verdict.admitted:
            if verdict.reason == LAYOUT:
                self.layout_refused[verdict.client_id] = verdict.detail
            self.client_out(verdict.client_id, "refused", f"update refused: {verdict.detail}")
        return verdict

    def _taken_together(self, first: _Waiting) -> list[_Waiting]:
        """The updates to decide in one turn: one, or many if many wait, for a transaction of many costs little more.

        No more than the round still needs: those behind them come too late.
        """
        together = [first]
        if len(self._waiting) >= MANY_WAITING:
            state = self._control.state
            most = max(1, min(MOST_TOGETHER, state.goal - len(state.admitted)))
            together += islice((each for each in self._waiting if each is not first), most - 1)
        for each in together:
            self._waiting.pop(each, None)
        return together

    async def _decide(self, together: list[_Waiting]) -> None:
        """Write the verdicts and act on them. The caller holds the run's turn."""
        wanted: list[_Waiting] = []
        for each in together:
            if self.refusal_of_update(each.header, each.update.client_id) is None:
                wanted.append(each)
            else:
                each.decided.set_result(None)
        try:
            await self._write_and_act(wanted)
        except Exception as error:  # noqa: BLE001 - passed on to each of the calls
            for each in wanted:
                if not each.decided.done():
                    each.decided.set_exception(error)

    async def _write_and_act(self, wanted: list[_Waiting]) -> None:
        context, control = self._context, self._control
        weighed = [Weighed(each.update, *context.fleet.quarantine.count_refusal(each.update)) for each in wanted]
        if len(weighed) == 1:
            verdicts = [await context.services.ledger.do(context.store.record_update, *weighed[0])]
        else:
            verdicts = await context.services.ledger.do(context.store.record_updates, weighed) if weighed else []
        for each, (update, standing, why), verdict in zip(wanted, weighed, verdicts, strict=True):
            if standing is not None and verdict == update:
                context.fleet.keep_refusals(standing, why)
            event = ev.UpdateAdmitted(verdict.client_id, verdict.digest)
            if verdict.admitted and verdict.digest == update.digest and control.applies(event):
                context.counters.assignment_ended("admitted")
                await control.take(event)
            each.decided.set_result(verdict)

    def client_out(self, client: str, state: str, why: str) -> None:
        """A client will not deliver. state, for the metric: "refused", "failed" or "lost"."""
        if state == "refused":
            self.refused.add(client)
            self._control.eligible.invalidate()
        if self._control.state.works(client):
            self._report_out(client, state, why)
            self._control.post(ev.ClientDroppedOut(client))

    async def client_failed(self, key: ExchangeKey, client: str, reason: Reason, *, finite: bool) -> bool:
        """A client reports that it cannot do its work. Returns False if no such work is wanted.

        finite: False if the client got a NaN or an infinity. The report takes effect before this returns, so that a
        repeat finds no work.
        """

        async def take() -> bool:
            if self.refusal_for(key, client) is not None or not self._control.state.works(client):
                return False
            if not finite:
                self.add_not_finite(client, reason.why)
            await self.take_failure(client, reason)
            return True

        return await self._control.in_turn(take)

    async def take_failure(self, client: str, reason: Reason) -> None:
        """An outstanding client will not deliver. The caller holds the run's turn."""
        event = ev.ClientDroppedOut(client, reason.cause, reason.why if reason.cause else "")
        if self._control.applies(event):
            await self.failures.add(client, reason)
            self._report_out(client, "failed", reason.why)
            await self._control.take(event)

    async def deadline_missed(self, late: tuple[str, ...]) -> None:
        """A deadline has passed without the updates of these clients. The caller holds the run's turn."""
        cancelled = set(late) - self._control.state.outstanding  # by the round's end; they go on in a further attempt
        self._context.log.transfers.outs.update(dict.fromkeys(cancelled, ("cancelled", "the deadline passed")))
        for client, why in await self.failures.add_missed_deadline(late):
            await self._context.fleet.note(client, why[:MAX_NOTE])
            await self.take_failure(client, Reason(why))

    def _report_out(self, client: str, state: str, why: str) -> None:
        context = self._context
        context.counters.assignment_ended(state)
        context.log.transfers.outs[client] = state, why
        log.info("client_out", run=context.run_id, round=self._control.state.round, client=client, state=state, why=why)
        context.watchers.publish(Progress("client_out", f"{client}: {why}"))

    # Accepted updates that are refused when the exchange is reduced.

    async def refuse_accepted(self, command: effects.DropCulprits) -> None:
        """Refuse accepted updates that spoil their round, then tell their clients.

        The ledger has the refusals, their effect on the clients' records, and the removal of the accepted list in one
        transaction. A coordinator that dies before it finds the same updates again.
        """
        context, control, why_of = self._context, self._control, dict(command.culprits)
        run_id, fleet = context.run_id, context.fleet
        updates = await control.read(context.store.updates, run_id, command.round, command.exchange)
        relative, absolute = RefusalReason.REFUSAL_REASON_RELATIVE_NORM, RefusalReason.REFUSAL_REASON_NORM
        reason = relative if command.relative else absolute
        refused = [
            replace(update, admitted=False, reason=RefusalReason.Name(reason), detail=why_of[update.client_id])
            for update in updates
            if update.client_id in why_of
        ]
        weighed = [fleet.quarantine.count_refusal(update) for update in refused]
        whys = [
            HistoryRecord(
                time.time(), "coordinator", "culprit_dropped", run_id, f"round {command.round}, {client}: {why}"
            )
            for client, why in command.culprits
        ]
        standings = [standing for standing, _ in weighed if standing is not None]
        quarantined = [why for _, why in weighed if why is not None]
        await control.write(context.store.refuse_accepted, refused, standings, [*whys, *quarantined])
        for standing, why in weighed:
            if standing is not None:
                fleet.keep_refusals(standing, why)
        for update in refused:
            await self._accepted_was_refused(update, reason)

    async def _accepted_was_refused(self, update: UpdateRecord, reason: RefusalReason) -> None:
        context, client = self._context, update.client_id
        word = update.reason.removeprefix("REFUSAL_REASON_").lower()
        context.counters.update_refused(word)
        self.refused.add(client)
        self._control.eligible.invalidate()
        log.warning("culprit_dropped", run=context.run_id, round=update.round, client=client, why=update.detail)
        context.watchers.publish(Progress("client_out", f"{client}: {update.detail}"))
        outcome = refused_outcome(update, reason, self._control.record.state_epoch)
        context.fleet.push(client, pb.AttendResponse(outcome=outcome))
        await context.fleet.note(client, f"update refused ({word}): {update.detail}"[:300])
        if reason == RefusalReason.REFUSAL_REASON_RELATIVE_NORM:
            self.norm_refused.add(client)
        else:
            self.add_not_finite(client, update.detail)

    # Runs that diverge, or whose model changes its layout.

    @property
    def remedy(self) -> str:
        """The command that resumes a diverged run with half its learning rate."""
        rate = self._control.config.local.learning_rate_in(self._control.state.round) / 2
        return f"fl run resume {self._context.run_id} --learning-rate {rate:g}"

    def add_not_finite(self, client: str, why: str) -> None:
        """A client got a NaN or an infinity. If enough clients did and no other update is there, the run fails."""
        self.not_finite[client] = why
        if len(self.not_finite) >= max(2, self._control.state.goal) and not self._control.state.admitted:
            self.fail_as_diverged()

    def fail_as_diverged(self) -> None:
        """Fail the run because training diverges. The last committed model stays."""
        round_ = self._control.state.round
        client, why = min(self.not_finite.items())
        self._control.fail(
            f"{len(self.not_finite)} clients got values that are not finite in round {round_}, and no client got "
            f"others; {model_of(round_ - 1)} stays. {client}: {why}. Lower the learning rate, or change what makes "
            f"such values; `{self.remedy}` continues from there"
        )

    def all_refused_for_norm(self) -> bool:
        """Whether several updates were refused for their norm and none is left: then no single client is the cause."""
        state, without_update = self._control.state, self.norm_refused | self.not_finite.keys()
        several = len(self.norm_refused) >= max(2, state.goal)
        return several and state.drawn <= without_update and not state.admitted

    def fail_for_norms(self) -> None:
        """Fail the run because all norms grew: training diverges, or the limit is too tight."""
        round_ = self._control.state.round
        self._control.fail(
            f"the updates of all {len(self.norm_refused)} clients of round {round_} had larger norms than the run "
            f"allows; {model_of(round_ - 1)} stays. Lower the learning rate; `{self.remedy}` continues from "
            "there. If such norms are right, create a run with another round.max_relative_norm or max_relative_payload"
        )

    def all_refused_for_layout(self) -> bool:
        """Whether all updates of the round were refused for the same difference between their layout and the model's.

        One client alone proves nothing about the model, unless no round was committed yet and no other is here.
        """
        state, refused = self._control.state, self.layout_refused
        alike = len({why.partition(", got ")[0] for why in refused.values()}) == 1
        alone = not state.round and refused.keys() >= set(state.candidates)
        several = len(refused) >= max(2, state.goal) or (alone and bool(refused))
        return alike and several and state.drawn <= refused.keys() and not state.admitted

    def fail_for_layout(self) -> None:
        """Fail the run because its model changes its layout in training, so that no update can ever count."""
        round_, (client, why) = self._control.state.round, min(self.layout_refused.items())
        self._control.fail(
            f"every update of round {round_} was refused for its layout; {model_of(round_ - 1)} stays. {client}: {why}."
            " What must change is no part of the model: keep it in a buffer with persistent=False"
        )

    def clear(self) -> None:
        """The round is over or redrawn: every client may be drawn again."""
        if self.refused:
            self._control.eligible.invalidate()
        self.refused.clear()
        self.not_finite.clear()
        self.norm_refused.clear()
        self.layout_refused.clear()
        self.failures.clear()
