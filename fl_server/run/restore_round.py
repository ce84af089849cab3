"""Restores the round under way: its cohort and updates as the ledger has them, checked against the bytes on disk."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import structlog

from fl_server.clients.quarantine import fault_of
from fl_server.rounds.by_client import BufferedUpdate, Failed, Refused, Work
from fl_server.rounds.restoring import SavedRound, restored_round, without_absent
from fl_server.rounds.state import Phase, RoundState, replace
from fl_server.run.computation import update_sources
from fl_server.run.failures import whole_time
from fl_server.run.run import Run
from fl_server.store.database.store import Store
from fl_server.store.records import AttemptRecord, FailureRecord, HistoryRecord, UpdateRecord
from fl_server.store.spool.spool import Spool, SpoolKey

log = structlog.get_logger()


async def restore_round_under_way(run: Run) -> None:
    """Restore the round under way in the exchange that it had reached."""
    ledger, store, fresh = run.context.services.ledger, run.context.store, run.state
    if fresh.policy.buffered:
        saved = await ledger.do(read_buffer, store, run.id, fresh, run.context.services.spool)
    else:
        saved = await ledger.do(read_round, store, run.id, fresh.round, run.context.services.spool)
    run.state = restored_round(fresh, saved)
    await run.model.load_versions(run.state.versions_in_use)
    if run.state.policy.secure:
        run.state = replace(run.state, graph=await run.stages.restore())
    if not await _reduce_earlier_exchanges(run):
        why = f"round {fresh.round}: bytes of an earlier exchange are torn or gone"
        entry = HistoryRecord(time.time(), "coordinator", "round_restarted", run.id, why)
        await ledger.do(store.restart_round, run.record, fresh.round, entry)
        await run.model.prepare(0)
        run.state = fresh
    if run.state.phase is Phase.COLLECTING or run.state.staged:
        run.context.cohort_log.info(
            "round_recovered", run=run.id, round=run.state.round, exchange=run.state.exchange,
            phase=run.state.phase.value, attempt=run.state.attempt,
            cohort=len(run.state.drawn), admitted=run.state.collected,
        )  # fmt: skip
        await _restore_byte_counts(run)
    failures, failed = run.submissions.failures, await ledger.do(store.failures, run.id, run.state.round)
    for version in sorted(run.state.versions_in_use - {run.state.round}):
        failed = [*failed, *await ledger.do(store.failures, run.id, version)]
    failures.restore(failed, failures.latest)
    attached = frozenset(run.context.fleet.attendance.roster.present())
    await _restore_statistics(run, failed, attached)
    run.rounds.bytes.resume(run.record.bytes_down, run.record.bytes_up)
    run.state = without_absent(run.state, attached.difference(run.client_states.left_out))


def read_round(store: Store, run_id: str, round_: int, spool: Spool) -> SavedRound:
    """What the ledger has of a round; blocking.

    Args:
        store: the ledger.
        run_id: the run.
        round_: its round under way.
        spool: has the bytes of admitted updates. An update with torn or missing bytes is dropped from the ledger, so
            that the client is asked for it again.
    """
    attempts = store.attempts(run_id, round_)
    if not attempts:
        return SavedRound(())
    exchange = max(attempt.exchange for attempt in attempts)
    updates = store.updates(run_id, round_, exchange)
    whole = _whole_updates(store, [update for update in updates if update.admitted], spool)
    fixed = store.accepted(run_id, round_, exchange)
    failures = [record for record in store.failures(run_id, round_) if record.exchange == exchange]
    stages = store.stages(run_id, round_)
    answers = store.answers(run_id, round_, attempts[-1].attempt) if stages or not updates else {}
    return SavedRound(
        attempts=[(attempt.exchange, attempt.attempt, attempt.cohort) for attempt in attempts],
        admitted=tuple((update.client_id, update.digest) for update in whole),
        fixed=None if fixed is None else tuple(fixed),
        refused={
            update.client_id: Refused(fault_of(update.reason), update.detail)
            for update in updates
            if not update.admitted
        },
        failed={record.client_id: _failed(record) for record in failures if record.failures},
        restarts={record.client_id: record.restarts for record in failures if record.restarts},
        stages={stage.stage: stage.members for stage in stages},
        answered=frozenset(answers.get(stages[-1].stage if stages else Phase.AGREEING.value, ())),
    )


def read_buffer(store: Store, run_id: str, fresh: RoundState, spool: Spool) -> SavedRound:
    """What the ledger has of the buffer, and of the work of clients in all versions that may be in use; blocking.

    fresh: the state before the round under way. An accepted list with torn bytes is given up: nobody knows of it.
    """
    round_, first = fresh.round, max(0, fresh.round - fresh.policy.max_staleness)
    waiting = store.waiting_updates(run_id, first, round_)
    order = {(update.round, update.client_id): place for place, update in enumerate(waiting)}
    whole = sorted(_whole_updates(store, waiting, spool), key=lambda update: order[update.round, update.client_id])
    here = {(update.client_id, update.round, update.digest) for update in whole}
    if not here.issuperset(store.taken(run_id, round_) or ()):
        why = f"round {round_}: bytes of its accepted list are torn or gone; the buffer is filled again"
        store.unfix(run_id, round_, HistoryRecord(time.time(), "coordinator", "round_restarted", run_id, why))
    assigned, failures = dict[str, Work](), dict[tuple[int, str], FailureRecord]()
    verdicts = dict[tuple[int, str], UpdateRecord]()
    for version in range(first, round_ + 1):
        for attempt in store.attempts(run_id, version):
            assigned.update(dict.fromkeys(attempt.cohort, Work(version, attempt.attempt)))
        verdicts.update({(version, update.client_id): update for update in store.updates(run_id, version, 0)})
        failures.update({(version, failure.client_id): failure for failure in store.failures(run_id, version)})
    work = {client: work for client, work in assigned.items() if (work.version, client) not in verdicts}
    known = {client: failures[one.version, client] for client, one in work.items() if (one.version, client) in failures}
    return SavedRound(
        attempts=[(0, attempt.attempt, attempt.cohort) for attempt in store.attempts(run_id, round_)],
        refused={
            client: Refused(fault_of(update.reason), update.detail)
            for (version, client), update in verdicts.items()
            if version == round_ and not update.admitted
        },
        failed={client: _failed(one) for client, one in known.items() if one.failures and one.round == round_},
        restarts={client: one.restarts for client, one in known.items() if one.restarts},
        work=work,
        buffer=tuple(BufferedUpdate(update.client_id, update.round, update.digest) for update in whole),
    )


def _failed(record: FailureRecord) -> Failed:
    return Failed(record.detail, record.cause, record.not_finite, times=record.failures)


def _whole_updates(store: Store, admitted: Sequence[UpdateRecord], spool: Spool) -> list[UpdateRecord]:
    """The admitted updates with whole bytes, in order of arrival."""
    whole = []
    for update in admitted:
        if _is_whole(spool, update):
            whole.append(update)
            continue
        why = HistoryRecord(
            time.time(), "coordinator", "update_dropped", update.run_id,
            f"round {update.round}, {update.client_id}: its bytes are torn or gone; it is asked for again",
        )  # fmt: skip
        log.warning("update_dropped", run=update.run_id, round=update.round, why="the history has its client")
        store.drop_update(update.run_id, update.round, update.exchange, update.client_id, why)
    return sorted(whole, key=lambda update: update.received_at)


async def _restore_byte_counts(run: Run) -> None:
    """Count the bytes of the round under way, as far as the ledger has them."""
    context, state = run.context, run.state
    for exchange in range(state.exchange + 1):
        updates = await context.services.ledger.do(context.store.updates, run.id, state.round, exchange)
        delivered = [(update.client_id, update.size_bytes) for update in updates if update.admitted]
        run.rounds.bytes.resume_exchange(run.model.bytes_down, delivered)
    run.rounds.transfers.resume(state.round, state.exchange, state.outstanding)


async def _restore_statistics(run: Run, failed: Sequence[FailureRecord], attached: AbstractSet[str]) -> None:
    """Count the assignments of the round under way that ended before, as far as the ledger has them.

    The ledger has no row for those that were lost or cancelled: neither an update nor a failure came of them, and their
    clients are waited for no more. They were lost if the client is away.
    """
    statistics, ledger, store, state = run.rounds.statistics, run.context.services.ledger, run.context.store, run.state
    attempts = await ledger.do(store.attempts, run.id, state.round)
    ended = Counter({"failed": sum(record.failures for record in failed)})
    for exchange in range(state.exchange + 1):
        updates = await ledger.do(store.updates, run.id, state.round, exchange)
        statistics.refused.update(update.refused_for for update in updates if not update.admitted)
        drawn = {client for attempt in attempts if attempt.exchange == exchange for client in attempt.cohort}
        known = {update.client_id for update in updates}
        known.update(record.client_id for record in failed if record.exchange == exchange and record.failures)
        if exchange < state.exchange:
            ended["admitted"] += sum(update.admitted for update in updates)
        else:
            known |= state.outstanding & attached
        ended["lost"] += len(drawn - known - attached)
        ended["cancelled"] += len((drawn - known) & attached)
    ended["refused"] = statistics.refused.total()
    statistics.assignments.update(+ended)


async def resume_deadline(run: Run) -> None:
    """Continue the deadline of the round under way, or of each draw, and the count of the time that the round takes."""
    context = run.context
    attempts = await context.services.ledger.do(context.store.attempts, run.id, run.state.round)
    run.rounds.began = time.monotonic() - _seconds_before(run, attempts)
    if not run.state.policy.buffered:
        last = attempts[-1]
        run.deadline.resume({(last.round, last.exchange, last.attempt): last.seconds_left})
        return
    for version in sorted(run.state.versions_in_use - {run.state.round}):
        attempts += await context.services.ledger.do(context.store.attempts, run.id, version)
    draws = {(work.version, work.attempt) for work in run.state.work.values()}
    run.deadline.resume(
        {
            (each.round, each.exchange, each.attempt): each.seconds_left
            for each in attempts
            if (each.round, each.attempt) in draws
        }
    )


def _seconds_before(run: Run, attempts: Sequence[AttemptRecord]) -> float:
    """Seconds that the round under way took before the restart, without the time in which no coordinator ran.

    By its deadlines: the ledger has the time left of each attempt up to its last write.
    """
    whole = whole_time(run)
    taken = [max(0.0, whole - (whole if each.seconds_left is None else each.seconds_left)) for each in attempts]
    return max(taken, default=0.0) if run.state.policy.buffered else sum(taken)


async def _reduce_earlier_exchanges(run: Run) -> bool:
    """Reduce the exchanges before the one under way again, because it sends their result.

    Returns False if the bytes of one of their updates are torn or gone.
    """
    context = run.context
    for exchange in range(run.state.exchange):
        updates = await context.services.ledger.do(context.store.accepted_updates, run.id, run.state.round, exchange)
        if not all([await context.services.in_io(_is_whole, context.services.spool, update) for update in updates]):
            return False
        await run.model.reduce(exchange, updates, update_sources(context.services.spool, updates))
    return True


def _is_whole(spool: Spool, update: UpdateRecord) -> bool:
    return spool.is_whole(SpoolKey(update.run_id, update.round, update.exchange, update.client_id), update.digest)
