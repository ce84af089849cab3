"""What a run does when the round state machine asks for it: one function a command.

Each keeps the order that makes a crash harmless: write down, then do, then tell.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec

import structlog

from fl_server import events as ev
from fl_server.assignments import Order, Place, assignment
from fl_server.engine import Snapshot
from fl_server.evaluation import prune, settle
from fl_server.outcomes import tell_outcomes
from fl_server.progress import Progress
from fl_server.round_compute import commit, reduce_exchange, step
from fl_server.round_state import Phase
from fl_server.runs.dropping import drop_culprits
from fl_server.runs.due_restarts import restart_if_due
from fl_server.runs.missing_members import look_for_missing
from fl_server.store.base import AttemptRecord, HistoryRecord, StoreError
from fl_server.waiting import why_waiting
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey, RefusalReason
from tasks import TaskError

if TYPE_CHECKING:
    from fl_server.run import Run

log = structlog.get_logger()
P = ParamSpec("P")

RETRY_S = 10.0
"""Wait before clients that failed in a round are drawn for it again."""
MOST_COMEBACKS = 3
"""Failures of a client in one round, after which it is not asked again because it says that it may train: each time
would give the attempt its whole deadline anew. It may still be drawn again at a retry."""


async def open_attempt(run: Run, command: ev.OpenAttempt) -> None:
    """Write the cohort down, push its assignments, start the deadline."""
    deadline_s, store = run.config.round.deadline_s, run.parts.ledger.store
    record = AttemptRecord(
        run.id, command.round, command.exchange, command.attempt, command.cohort, time.time(), deadline_s
    )
    await run.parts.ledger.insist(run.no_room, store.open_attempt, record, _opened(run, record))
    if command.exchange == 0 and not run.round_began:
        run.round_began = record.opened_at
    if run.waiting_for:
        run.waiting_for = ""
        await run.save_status("run_goes_on")
    run.parts.metrics.attempts.labels(run.id).inc()
    log.info(
        "attempt_opened", run=run.id, round=command.round, exchange=command.exchange, attempt=command.attempt,
        clients=len(command.cohort),
    )  # fmt: skip
    run.deadline.start(deadline_s)
    # Stragglers of earlier attempts go on; a daemon that was not told of more time would stop at its earlier deadline.
    stragglers = sorted(run.state.outstanding - set(command.cohort))
    for client in (*command.cohort, *stragglers):
        push_assignment(run, client)


def _opened(run: Run, attempt: AttemptRecord) -> HistoryRecord:
    exchange = f", exchange {attempt.exchange}" if attempt.exchange else ""
    here = f", {_are(len(run.state.admitted), 'update')} here" if run.state.admitted else ""
    drawn = _are(len(attempt.cohort), "client")
    detail = f"round {attempt.round}{exchange}, attempt {attempt.attempt}: {drawn} drawn{here}"
    return HistoryRecord(attempt.opened_at, "coordinator", "attempt_opened", run.id, detail)


def _are(count: int, what: str) -> str:
    return f"1 {what} is" if count == 1 else f"{count} {what}s are"


def push_assignment(run: Run, client: str) -> None:
    """Tell a client of the cohort what to do, if it is attached; a coordinator that leaves has the next one tell it."""
    if run.held:
        return
    order = Order(
        run.id, run.config, run.behaviour.algorithm, run.behaviour.fingerprint, run.model.broadcasts,
        run.parts.config.limits.max_update_mib << 20, run.record.state_epoch,
    )  # fmt: skip
    # Between two attempts no deadline runs; the next one begins with the whole time.
    left = run.deadline.seconds_left if run.state.phase is Phase.COLLECTING else run.config.round.deadline_s
    place = Place(run.state.round, run.state.exchange, run.state.attempt, left)
    work = assignment(order, place, client, run.client_states.of(client))
    work.traceparent = run.trace.parent_for(run.state)
    run.parts.fleet.push(client, pb.AttendResponse(assignment=work))


def reattached(run: Run, client: str) -> None:
    """A client is here again, or may train again: push what it still has to do.

    One that may not train goes on with what it has begun, or says that it will not; what it gave up it is spared.
    """
    if run.state.phase not in (Phase.COLLECTING, Phase.SELECTING) or client not in run.state.drawn - run.intake.refused:
        return
    if client in run.state.outstanding:
        push_assignment(run, client)
    elif client in run.state.out and _may_come_back(run, client):
        run.spawn(_come_back(run, client))


async def _come_back(run: Run, client: str) -> None:
    """Reckon with the client before it is asked, or a failure that it reports at once would be about no work of its."""
    async with run.turn:
        event = ev.ClientBack(client)
        if run.applies(event):
            collecting = run.state.phase is Phase.COLLECTING
            await run.take(event)
            if collecting:  # else the attempt that begins now has asked it
                push_assignment(run, client)


def _may_come_back(run: Run, client: str) -> bool:
    """Whether a client that gave its work up is asked for it once more."""
    fleet = run.parts.fleet
    return (
        fleet.workforce.availability(client).may_train
        and fleet.quarantine.of(client) is None
        and client not in run.client_states.kept_out(run.record.state_epoch)
        and run.intake.gave_up[client] < MOST_COMEBACKS
    )


async def quorum_missed(run: Run, command: ev.QuorumMissed) -> None:
    """An attempt was not enough: the next one says so in its line of the history."""
    run.tally.quorum_missed()
    log.warning(
        "quorum_missed", run=run.id, round=command.round, exchange=command.exchange, attempt=command.attempt,
        admitted=command.admitted, quorum=command.quorum,
    )  # fmt: skip


async def await_clients(run: Run, command: ev.AwaitClients) -> None:
    """Say that too few clients are here."""
    waiting = f"{command.present} of {command.needed} clients are here that could be drawn"
    if waiting != run.waiting_for:
        run.waiting_for = waiting
        log.info("run_waits", run=run.id, why=why_waiting(run, waiting))
        await run.save_status("run_waits")
    restart_if_due(run, at_once=True)


async def retry_later(run: Run, command: ev.RetryLater) -> None:
    """Give those who failed another chance after a while, unless all came to nothing finite."""
    del command
    if run.state.drawn <= run.intake.not_finite and not run.state.admitted:
        run.intake.fail_as_diverged()
        return
    if run.intake.all_too_long():
        run.intake.fail_as_too_long()
        return
    run.set_timer(RETRY_S, ev.RetryDue())


async def cancel(run: Run, command: ev.Cancel) -> None:
    """Tell clients that their work is not wanted any more."""
    key = ExchangeKey(run_id=run.id, round=run.state.round, exchange=command.exchange)
    reason = RefusalReason.REFUSAL_REASON_ABANDONED if run.ended else RefusalReason.REFUSAL_REASON_NOT_NEEDED
    for client in command.clients:
        run.tally.assignment("cancelled")
        order = pb.Cancel(key=key, reason=reason)
        run.parts.fleet.push(client, pb.AttendResponse(cancel=order))


async def restart_round(run: Run, command: ev.RestartRound) -> None:
    """Forget what the round collected; where client states start anew, in a new epoch, so does their sum here."""
    record = replace(run.record, state_epoch=run.record.state_epoch + 1) if command.states else run.record
    event = "states_restarted" if command.states else "round_restarted"
    why = HistoryRecord(time.time(), "coordinator", event, run.id, f"round {command.round}: {command.why}")
    await run.parts.ledger.insist(run.no_room, run.parts.ledger.store.restart_round, record, command.round, why)
    log.warning(event, run=run.id, round=command.round, why=command.why, state_epoch=record.state_epoch)
    run.record = record
    run.intake.forget_failures()
    if command.states:
        run.client_states.restart()
        run.look_again()  # who waited for this may be drawn again
        run.fleet_changed()
        await run.model.restart()
    if run.model.loaded:
        await run.model.prepare(0)


async def announce(run: Run, command: ev.Announce) -> None:
    """Tell the cohort what became of its updates; tidy up; start the evaluations that are due."""
    record = run.log.commits[command.round]
    metrics = run.parts.metrics
    metrics.rounds.labels(run.id, "committed").inc()
    metrics.round_seconds.labels(run.id).observe(record.seconds)
    log.info(
        "round_committed", run=run.id, round=command.round, accepted=record.accepted, dropped=record.dropped,
        attempts=record.attempts, seconds=round(record.seconds, 3), training_loss=record.training_loss,
        bytes_down=record.bytes_down, bytes_up=record.bytes_up, model=record.model_digest,
    )  # fmt: skip
    await tell_outcomes(run, command.round)
    await look_for_missing(run)
    run.watchers.tell(Progress("committed", commit=record))
    await _tidy(run, run.parts.spool.remove_round, run.id, command.round)
    await prune(run)
    if command.ask_clients:
        await run.client_evaluations.begin(command.round, run.config.evaluation.clients_deadline_s)
    if command.evaluate:
        await start_evaluation(run)


async def start_evaluation(run: Run) -> None:
    """Evaluate the latest model beside the next round; at most one evaluation is behind."""
    if run.evaluation is not None:
        await run.evaluation
    run.evaluation = run.spawn(_evaluate(run, run.model.snapshot))


async def _evaluate(run: Run, snapshot: Snapshot) -> None:
    try:
        metrics = await run.model.evaluate(snapshot)
    except TaskError as error:
        log.error("evaluation_failed", run=run.id, round=snapshot.round, error=str(error), exc_info=error)
        run.fail(f"evaluation of round {snapshot.round} failed: {error}")
        return
    await settle(run, snapshot.round, metrics, "server")


async def end(run: Run, command: ev.End) -> None:
    """The run is over: write it down, and let go of what it held."""
    run.waiting_for = ""
    await run.save_status(f"run_{command.status}")
    level = log.error if command.status == "failed" else log.info
    level("run_ended", run=run.id, status=command.status, reason=command.reason, rounds=run.state.round)
    if run.evaluation is not None and not run.evaluation.done() and command.status == "completed":
        await run.evaluation
    if run.state.goal:
        run.parts.metrics.rounds.labels(run.id, "abandoned").inc()
    await let_go(run)
    if run.model.loaded:  # one that could not be read keeps what there is, for whoever repairs it
        await prune(run)
    run.parts.metrics.told.over(run.id, run.record.ended_at or time.time())
    run.model.unload()
    run.client_states.missing = frozenset()
    if run.behaviour.algorithm.keeps_client_state:
        for client in run.parts.fleet.present():
            run.parts.fleet.push(client, pb.AttendResponse(run_ended=pb.RunEnded(run_id=run.id)))
    run.watchers.end()


async def let_go(run: Run) -> None:
    """What an ended run had of its last round; after a restart again, for a crash may have come in between."""
    await _give_up_round(run)
    await _tidy(run, run.parts.spool.remove_run, run.id)


async def _tidy(run: Run, remove: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Remove what is not needed any more; what cannot be removed is only in the way."""
    try:
        await run.parts.in_io(remove, *args, **kwargs)
    except StoreError as error:
        log.warning("not_removed", run=run.id, error=str(error))


async def _give_up_round(run: Run) -> None:
    """What a round that the end cut short had admitted will not count; if the run is extended, it is asked for anew."""
    state, store = run.state, run.parts.ledger.store
    why = HistoryRecord(time.time(), "coordinator", "update_given_up", run.id, f"round {state.round}: the run ended")
    for update in await run.parts.ledger.insist(run.no_room, store.updates, run.id, state.round, state.exchange):
        key = (run.id, state.round, state.exchange, update.client_id)
        await run.parts.ledger.insist(run.no_room, store.drop_update, *key, why)


CARRY_OUT: Mapping[type, Callable[[Run, Any], Awaitable[None]]] = {
    ev.OpenAttempt: open_attempt,
    ev.QuorumMissed: quorum_missed,
    ev.AwaitClients: await_clients,
    ev.RetryLater: retry_later,
    ev.Cancel: cancel,
    ev.RestartRound: restart_round,
    ev.ReduceExchange: reduce_exchange,
    ev.Step: step,
    ev.DropCulprits: drop_culprits,
    ev.Commit: commit,
    ev.Announce: announce,
    ev.End: end,
}
