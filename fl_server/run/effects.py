"""Carries out the commands of the round state machine: one handler for each command.

Each handler keeps the order that makes a crash harmless: write to the ledger, then act, then tell the clients.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from fl_common.units import counted
from fl_server.rounds import effects
from fl_server.rounds import events as ev
from fl_server.run.assignments import AssignmentDispatch
from fl_server.run.client_evaluations import ClientEvaluations
from fl_server.run.client_states import accepted_outcome, not_needed_outcome
from fl_server.run.client_warnings import warn_of_low_shares, warn_of_missing_members
from fl_server.run.computation import RoundComputation
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl, with_turns
from fl_server.run.evaluations import ServerEvaluations, prune_checkpoints
from fl_server.run.failures import Deadline, Reason, whole_time
from fl_server.run.lost_states import LostStates
from fl_server.run.progress import Progress
from fl_server.run.secure_stages import SecureStages
from fl_server.run.status import why_waiting
from fl_server.run.submissions import Submissions
from fl_server.store.errors import StoreError
from fl_server.store.records import AttemptRecord, HistoryRecord, UpdateRecord
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey, RefusalReason

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RunParts:
    """The parts of a run that act on its events and on clients' calls."""

    deadline: Deadline
    submissions: Submissions
    stages: SecureStages
    dispatch: AssignmentDispatch
    lost_states: LostStates
    computation: RoundComputation
    server_evaluation: ServerEvaluations
    client_evaluations: ClientEvaluations

    @classmethod
    def create(cls, context: RunContext, control: RunControl) -> RunParts:
        """All parts of one run."""
        deadline, submissions = Deadline(context, control), Submissions(context, control)
        stages = SecureStages(context, control, submissions)
        dispatch = AssignmentDispatch(context, control, deadline, stages)
        evaluation = ServerEvaluations(context, control)
        lost_states, clients = LostStates(context, control, submissions), ClientEvaluations(context, control)
        computation = RoundComputation(context, control, stages, evaluation)
        return cls(deadline, submissions, stages, dispatch, lost_states, computation, evaluation, clients)


class Effects:
    """Handles the commands of one run. Lives on the event loop."""

    def __init__(self, context: RunContext, control: RunControl, parts: RunParts) -> None:
        self._context, self._control, self._parts = context, control, parts
        self._handlers: Mapping[type, Callable[[Any], Awaitable[None]]] = {
            effects.OpenAttempt: self._open_attempt,
            effects.OpenStage: self._open_stage,
            effects.QuorumMissed: self._quorum_missed,
            effects.AwaitClients: self._await_clients,
            effects.RetryLater: self._retry_later,
            effects.SendWork: self._send_work,
            effects.RecordFailure: self._record_failure,
            effects.DeadlineMissed: parts.submissions.deadline_missed,
            effects.Cancel: self._cancel,
            effects.RestartRound: self._restart_round,
            effects.DropCulprits: parts.submissions.refuse_accepted,
            effects.Announce: self._announce,
            effects.EndRun: self._end,
            **parts.computation.handlers,
        }

    async def handle(self, command: effects.Effect) -> None:
        """Carry out a command."""
        await self._handlers[type(command)](command)

    async def _open_attempt(self, command: effects.OpenAttempt) -> None:
        """Write the cohort, start the deadline, send the assignments."""
        context, control = self._context, self._control
        deadline_s, policy = whole_time(control), control.state.policy
        record = AttemptRecord(
            context.run_id, command.round, command.exchange, command.attempt, command.cohort, time.time(), deadline_s
        )
        account = control.account
        charge = None
        if account is not None:
            charge = account.charge(context.run_id, command, control.state.draws, context.model.snapshot.clip)
        await control.write(context.store.open_attempt, record, self._opened(record), charge)
        if charge is not None:
            await control.retry(partial(context.services.in_io, context.services.secrets.counted, charge))
        if command.exchange == 0 and context.rounds.began is None:
            context.rounds.began = time.monotonic()
        if policy.buffered:
            context.rounds.transfers.forget(command.cohort)
        else:
            context.rounds.transfers.begin(command.round, command.exchange)
        await control.run_status.goes_on()
        context.metrics.attempts.labels(context.run_id).inc()
        context.cohort_log.info(
            "attempt_opened", run=context.run_id, round=command.round, exchange=command.exchange,
            attempt=command.attempt, clients=len(command.cohort),
        )  # fmt: skip
        if policy.secure:
            self._parts.stages.begin(command.cohort)
        self._parts.deadline.start(deadline_s)
        # Without a new assignment stragglers would stop at their earlier deadline.
        asked = (*command.cohort, *control.stragglers(command))
        control.unwritten = control.unwritten - set(asked) if policy.buffered else frozenset()
        self._parts.dispatch.push_all(asked)

    async def _open_stage(self, command: effects.OpenStage) -> None:
        """Write a stage of secure aggregation, start its deadline, send its messages."""
        control, parts = self._control, self._parts
        await parts.stages.open(command)
        parts.deadline.start(whole_time(control))
        present = self._context.fleet.attendance.roster.present()
        for client in command.members:
            if client in present:
                parts.dispatch.push_stage(client)
            else:
                parts.submissions.client_gone(client, "lost")

    def _opened(self, attempt: AttemptRecord) -> HistoryRecord | None:
        """A line on the draw. With a buffer only the first one of a round has one: there is one for each free slot."""
        if self._control.state.policy.buffered and attempt.attempt > self._control.state.first_attempt:
            return None
        exchange = f", exchange {attempt.exchange}" if attempt.exchange else ""
        admitted = self._control.state.collected
        here = f", {_are(admitted, 'update')} here" if admitted else ""
        drawn = _are(len(attempt.cohort), "client")
        without = f"; it {self._control.eligible.without}" if self._control.eligible.without else ""
        who = "its cohort is drawn" if self._context.hides_cohorts else f"{drawn} drawn{here}{without}"
        detail = f"round {attempt.round}{exchange}, attempt {attempt.attempt}: {who}"
        return HistoryRecord(attempt.opened_at, "coordinator", "attempt_opened", self._context.run_id, detail)

    async def _quorum_missed(self, command: effects.QuorumMissed) -> None:
        """Count an attempt with too few updates. The next attempt has a line in the history."""
        self._context.counters.quorum_missed()
        self._context.cohort_log.warning(
            "quorum_missed", run=self._context.run_id, round=command.round, exchange=command.exchange,
            attempt=command.attempt, admitted=command.admitted, quorum=command.quorum,
        )  # fmt: skip

    async def _await_clients(self, command: effects.AwaitClients) -> None:
        """Report that too few clients are eligible."""
        control = self._control
        waiting = f"clients that could be drawn: {command.present} of {command.needed} here"
        if control.run_status.waits(waiting, command.present):
            why = why_waiting(self._context, control)
            log.info("run_waits", run=self._context.run_id, why=why)
            await control.run_status.save("run_waits", why)

    async def _retry_later(self, command: effects.RetryLater) -> None:
        """Draw clients that failed again after a delay."""
        del command
        self._control.set_timer(effects.RETRY_S, ev.RetryDue())

    async def _send_work(self, command: effects.SendWork) -> None:
        """Send a client its assignment again."""
        self._parts.dispatch.push(command.client)

    async def _record_failure(self, command: effects.RecordFailure) -> None:
        """Write and report a failure that the state machine concluded."""
        await self._parts.submissions.record_failure(command.client, Reason(command.why))

    async def _cancel(self, command: effects.Cancel) -> None:
        """Tell clients that their work is not needed any more."""
        context, control = self._context, self._control
        reason = RefusalReason.REFUSAL_REASON_ABANDONED if control.ended else RefusalReason.REFUSAL_REASON_NOT_NEEDED
        if command.rounds and not control.ended:
            reason = RefusalReason.REFUSAL_REASON_STALE
        rounds = command.rounds or (control.state.round,) * len(command.clients)
        async for client, round_ in with_turns(zip(command.clients, rounds, strict=True)):
            key = ExchangeKey(run_id=context.run_id, round=round_, exchange=command.exchange)
            context.counters.assignments_ended("cancelled")
            context.fleet.streams.push(client, pb.AttendResponse(cancel=pb.Cancel(key=key, reason=reason)))

    async def _restart_round(self, command: effects.RestartRound) -> None:
        """Forget what the round collected. If client states restart too, the server's sum of them restarts."""
        context, control = self._context, self._control
        event = "states_restarted" if command.states else "round_restarted"
        detail = f"round {command.round}: {command.why}"
        why = HistoryRecord(time.time(), "coordinator", event, context.run_id, detail)
        await control.run_status.restart_round(command, why)
        log.warning(event, run=context.run_id, round=command.round, why=command.why, state_epoch=command.state_epoch)
        self._parts.submissions.failures.clear()
        context.rounds.transfers.clear()
        if command.states:
            context.client_states.restart_all()
            await context.model.restart_states()
        if context.model.loaded:
            await context.model.prepare(0)

    async def _announce(self, command: effects.Announce) -> None:
        """Send the cohort its outcomes, remove what is not needed any more, start the evaluations that are due."""
        context, control = self._context, self._control
        record = context.rounds.recent[command.round]
        context.metrics.rounds.labels(context.run_id, "committed").inc()
        context.metrics.round_seconds.labels(context.run_id).observe(record.seconds)
        context.cohort_log.info(
            "round_committed", run=context.run_id, round=command.round, accepted=record.accepted,
            dropped=record.dropped, attempts=record.attempts, seconds=round(record.seconds, 3),
            training_loss=record.training_loss, bytes_down=record.bytes_down, bytes_up=record.bytes_up,
            model=record.model_digest,
        )  # fmt: skip
        await send_outcomes(context, control, command.round)
        await warn_of_missing_members(context, control)
        await warn_of_low_shares(context, control)
        context.watchers.publish(Progress("committed", commit=record))
        await self._remove_uploads(command.round)
        context.model.keep_versions(control.state.versions_in_use)
        await prune_checkpoints(context, control)
        if command.ask_clients:
            await self._parts.client_evaluations.start(command.round, control.config.evaluation.clients_deadline_s)
        if command.evaluate:
            self._parts.server_evaluation.start()

    async def _remove_uploads(self, round_: int) -> None:
        """Remove the updates of a committed round; with a buffer, of all versions before the oldest one in use."""
        context, state = self._context, self._control.state
        rounds = [round_]
        if state.policy.buffered and self._control.ended:
            return  # updates that wait in the buffer are given up first, and then all files are removed
        if state.policy.buffered:
            oldest = min(state.versions_in_use, default=state.round)
            rounds = list(range(max(0, round_ - state.policy.max_staleness - 1), min(oldest, round_ + 1)))
        with _removal(context):
            for each in rounds:
                await context.services.in_io(context.services.spool.remove_round, context.run_id, each)

    async def _end(self, command: effects.EndRun) -> None:
        """Write that the run is over, and release what it held, also if it cannot be written."""
        context, control = self._context, self._control
        await self._parts.computation.stop()
        context.services.outside.forget_ends(context.run_id)
        try:
            await control.run_status.ended(command.status)
            level = log.error if command.status == "failed" else log.info
            level(
                "run_ended", run=context.run_id, status=command.status, reason=control.end_reason,
                rounds=control.state.round,
            )  # fmt: skip
            if control.state.goal:
                context.metrics.rounds.labels(context.run_id, "abandoned").inc()
            await self._release_files()
        finally:
            await self._release()

    async def _release_files(self) -> None:
        """Remove files and rows that are not needed any more. A failure leaves them to the next start."""
        context, control = self._context, self._control
        try:
            await release_round(context, control)
        except StoreError as error:
            log.warning("round_not_released", run=context.run_id, round=control.state.round, error=str(error))
        if context.model.loaded:  # a run that could not be read keeps all checkpoints, for a repair
            await prune_checkpoints(context, control)

    async def _release(self) -> None:
        """Release the memory of the run that is over, and tell its clients and watchers."""
        context, control = self._context, self._control
        context.metrics.reported.ended(context.run_id, control.record.ended_at or time.time())
        context.model.unload()
        context.client_states.missing = frozenset()
        await self._parts.client_evaluations.send_run_ended()
        if self._parts.server_evaluation.under_way:
            control.spawn(self._end_watching())
        else:
            context.watchers.end()

    async def _end_watching(self) -> None:
        """Watchers of a run that is over still see the evaluation under way."""
        await self._parts.server_evaluation.finish()
        if self._control.ended:
            self._context.watchers.end()


def _are(count: int, what: str) -> str:
    return f"{counted(count, what)} {'is' if count == 1 else 'are'}"


async def send_outcomes(context: RunContext, control: RunControl, round_: int) -> None:
    """Send the outcome of a committed round to every client that was asked in any of its exchanges.

    With a buffer, to those whose updates it has: the others still work, or their updates count later.
    """
    run_id, store, epoch = context.run_id, context.store, context.rounds.recent[round_].state_epoch
    if control.state.policy.buffered:
        async for counted in with_turns(await control.read(store.accepted_updates, run_id, round_, 0)):
            message = pb.AttendResponse(outcome=accepted_outcome(counted, epoch))
            context.fleet.streams.push(counted.client_id, message)
        return
    asked: dict[int, set[str]] = {}
    for attempt in await control.read(store.attempts, run_id, round_):
        asked.setdefault(attempt.exchange, set()).update(attempt.cohort)
    for exchange, clients in asked.items():
        key = ExchangeKey(run_id=run_id, round=round_, exchange=exchange)
        updates = await control.read(store.accepted_updates, run_id, round_, exchange)
        by_client = {update.client_id: update for update in updates}
        async for client in with_turns(clients):
            update = by_client.get(client)
            outcome = not_needed_outcome(key, epoch) if update is None else accepted_outcome(update, epoch)
            context.fleet.streams.push(client, pb.AttendResponse(outcome=outcome))


async def release_round(context: RunContext, control: RunControl) -> None:
    """Remove what an ended run had of its last round. Repeated after a restart: a crash may have come in between.

    The admitted updates of a round that the end cut short will not count. If the run is extended, they are asked for
    again.
    """
    run_id, state, store = context.run_id, control.state, context.store
    if state.round < context.rounds.committed:
        return  # the end came while the round was committed
    why = HistoryRecord(time.time(), "coordinator", "update_given_up", run_id, f"round {state.round}: the run ended")
    given_up: list[UpdateRecord]
    if state.policy.buffered:
        first = max(0, state.round - state.policy.max_staleness)
        given_up = await control.read(store.waiting_updates, run_id, first, state.round)
        await control.write(store.unfix, run_id, state.round, why)
    else:
        given_up = await control.read(store.updates, run_id, state.round, state.exchange)
    for update in given_up:
        await control.write(store.drop_update, run_id, update.round, update.exchange, update.client_id, why)
    with _removal(context):
        await control.retry(partial(context.services.in_io, context.services.spool.remove_run, run_id))


@contextmanager
def _removal(context: RunContext) -> Iterator[None]:
    """Files are removed that are not needed any more: a failure is logged and has no other effect."""
    try:
        yield
    except StoreError as error:
        log.warning("not_removed", run=context.run_id, error=str(error))
