"""Restores the round under way: its cohort and updates as the ledger has them, checked against the bytes on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import structlog

from fl_server.admission.gate import NORM_REASONS
from fl_server.rounds.selecting import goal_of
from fl_server.rounds.state import Failed, Phase, RoundState
from fl_server.runs.computation import update_paths
from fl_server.runs.run import Run
from fl_server.runs.submissions import LAYOUT
from fl_server.store.errors import NoOpenFiles, StoreError
from fl_server.store.files import file_digest
from fl_server.store.protocol import Store, accepted_updates
from fl_server.store.records import AttemptRecord, HistoryRecord, UpdateRecord
from fl_server.store.spool.spool import SpoolKey
from protos.fl.v1.training_pb2 import RefusalReason

log = structlog.get_logger()

_NORMS = frozenset(RefusalReason.Name(reason) for reason in NORM_REASONS)
IsWhole = Callable[[UpdateRecord], bool]


async def restore_round_under_way(run: Run) -> None:
    """Restore the round under way in the exchange that it had reached."""
    ledger, store, fresh = run.context.services.ledger, run.context.store, run.state
    run.state = await ledger.do(restore_round, store, run.id, fresh, partial(_is_whole, run))
    if not await _reduce_earlier_exchanges(run):
        why = f"round {fresh.round}: bytes of an earlier exchange are torn or gone"
        entry = HistoryRecord(time.time(), "coordinator", "round_restarted", run.id, why)
        await ledger.do(store.restart_round, run.record, fresh.round, entry)
        await run.model.prepare(0)
        run.state = fresh
    state, submissions = run.state, run.submissions
    failures = await ledger.do(store.failures, run.id, state.round)
    submissions.failures.restore(failures, submissions.failures.latest)
    updates = await ledger.do(store.updates, run.id, state.round, state.exchange)
    if state.phase is Phase.COLLECTING:
        await _restore_byte_counts(run)
    run.log.resume_bytes(run.record.bytes_down, run.record.bytes_up)
    submissions.refused = {update.client_id for update in updates if not update.admitted}
    submissions.norm_refused = {
        update.client_id for update in updates if not update.admitted and update.reason in _NORMS
    }
    submissions.layout_refused = {
        update.client_id: update.detail for update in updates if not update.admitted and update.reason == LAYOUT
    }
    # Not waited for: clients that were lost before the restart, that were refused, or that must not be drawn.
    never = submissions.refused | run.client_states.excluded(run.record.state_epoch)
    run.state = replace(state, out=state.outstanding - (set(run.context.fleet.present()) - never))


def restore_round(store: Store, run_id: str, fresh: RoundState, is_whole: IsWhole) -> RoundState:
    """The round under way as the ledger has it; blocking.

    Args:
        store: the ledger.
        run_id: the run.
        fresh: the run's state at the start of that round.
        is_whole: whether an admitted update's bytes are on disk as the ledger says. An update with torn or missing
            bytes is dropped from the ledger, so that the client is asked for it again.
    """
    attempts = store.attempts(run_id, fresh.round)
    if not attempts:
        return fresh
    exchange = max(attempt.exchange for attempt in attempts)
    fresh = replace(fresh, first_attempt=min(attempt.attempt for attempt in attempts))
    state = _collecting(fresh, [attempt for attempt in attempts if attempt.exchange == exchange])
    admitted = [(update.client_id, update.digest) for update in _whole_updates(store, run_id, state, is_whole)]
    fixed = store.accepted(run_id, state.round, exchange)
    if fixed is not None:
        # The list was fixed and the computation had begun: the exchange consists of these updates and no others.
        members = frozenset(client for client, _ in fixed)
        state = replace(state, goal=len(fixed), drawn=members, fixed=tuple(fixed))
        admitted = [entry for entry in fixed if entry in admitted]
    state = replace(state, admitted=tuple(admitted), failed=_failed(store, run_id, state, {who for who, _ in admitted}))
    log.info(
        "round_recovered", run=run_id, round=state.round, exchange=exchange, attempt=state.attempt,
        cohort=len(state.drawn), admitted=len(admitted),
    )  # fmt: skip
    return state


def _collecting(fresh: RoundState, attempts: Sequence[AttemptRecord]) -> RoundState:
    """The state in phase COLLECTING, with every client of the attempts."""
    first = attempts[0].cohort
    exchange = attempts[0].exchange
    return replace(
        fresh,
        phase=Phase.COLLECTING,
        exchange=exchange,
        attempt=attempts[-1].attempt,
        goal=len(first) if exchange else goal_of(fresh.policy, first),
        drawn=frozenset(client for attempt in attempts for client in attempt.cohort),
    )


def _failed(store: Store, run_id: str, state: RoundState, delivered: Collection[str]) -> tuple[Failed, ...]:
    """The clients whose work failed in the task's code, apart from those that have delivered since."""
    records = [each for each in store.failures(run_id, state.round) if each.exchange == state.exchange and each.cause]
    return tuple(Failed(each.client_id, each.cause, each.detail) for each in records if each.client_id not in delivered)


def _whole_updates(store: Store, run_id: str, state: RoundState, is_whole: IsWhole) -> list[UpdateRecord]:
    """The admitted updates with whole bytes, in order of arrival."""
    whole = []
    for update in store.updates(run_id, state.round, state.exchange):
        if update.admitted and is_whole(update):
            whole.append(update)
        elif update.admitted:
            why = HistoryRecord(
                time.time(), "coordinator", "update_dropped", run_id,
                f"round {state.round}, {update.client_id}: its bytes are torn or gone; it is asked for again",
            )  # fmt: skip
            log.warning("update_dropped", run=run_id, round=state.round, client=update.client_id)
            store.drop_update(run_id, state.round, state.exchange, update.client_id, why)
    return sorted(whole, key=lambda update: update.received_at)


async def _restore_byte_counts(run: Run) -> None:
    """Count the bytes of the round under way, as far as the ledger has them."""
    context, state = run.context, run.state
    for exchange in range(state.exchange + 1):
        updates = await context.services.ledger.do(context.store.updates, run.id, state.round, exchange)
        run.log.resume_exchange(run.model.bytes_down, [update for update in updates if update.admitted])
    run.log.transfers.resume(state.round, state.exchange, state.outstanding)


async def resume_deadline(run: Run) -> None:
    """Continue the deadline of the round under way, and the count of the time that it takes."""
    context = run.context
    attempts = await context.services.ledger.do(context.store.attempts, run.id, run.state.round)
    run.log.began = time.monotonic() - _seconds_before(run, attempts)
    run.deadline.resume(attempts[-1].seconds_left)


def _seconds_before(run: Run, attempts: Sequence[AttemptRecord]) -> float:
    """Seconds that the round under way took before the restart, without the time in which no coordinator ran.

    By its deadlines: the ledger has the time left of each attempt up to its last write.
    """
    whole = run.config.round.deadline_s
    return sum(max(0.0, whole - (whole if each.seconds_left is None else each.seconds_left)) for each in attempts)


async def _reduce_earlier_exchanges(run: Run) -> bool:
    """Reduce the exchanges before the one under way again, because it sends their result.

    Returns False if the bytes of one of their updates are torn or gone.
    """
    context = run.context
    for exchange in range(run.state.exchange):
        updates = await context.services.ledger.do(accepted_updates, context.store, run.id, run.state.round, exchange)
        if not all([await context.services.in_io(_is_whole, run, update) for update in updates]):
            return False
        await run.model.reduce(exchange, updates, update_paths(context.services.spool, updates))
    return True


def _is_whole(run: Run, update: UpdateRecord) -> bool:
    key = SpoolKey(update.run_id, update.round, update.exchange, update.client_id)
    try:
        return file_digest(run.context.services.spool.path(key, update.digest)) == update.digest
    except NoOpenFiles:
        raise  # nothing is known about the update
    except (OSError, StoreError):
        return False
