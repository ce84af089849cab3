"""A run, read back after a restart: its models, the round it was in, and evaluations that are missing."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import structlog

from fl_server import events as ev
from fl_server.admission import file_digest
from fl_server.client_metrics import PREFIX, has_evaluation
from fl_server.deadline import after_restart
from fl_server.evaluation import prune, reason_to_stop
from fl_server.recovery import recover_round
from fl_server.round_committing import awaited_evaluations, clients_due, evaluation_due
from fl_server.round_compute import accepted_updates, update_paths
from fl_server.round_state import Phase
from fl_server.round_work import let_go, start_evaluation
from fl_server.run import Run
from fl_server.runs.due_restarts import restart_if_due
from fl_server.runs.missing_members import missing_members
from fl_server.spool import SpoolKey
from fl_server.store.base import HistoryRecord, NoOpenFiles, StoreAway, StoreError, StoreFull, UpdateRecord
from protos.fl.v1.training_pb2 import RefusalReason

log = structlog.get_logger()

_NORM = RefusalReason.Name(RefusalReason.REFUSAL_REASON_NORM)
_ENDED = ("completed", "stopped", "failed")


async def read_back(run: Run) -> None:
    """Go on where the ledger says; a run whose state cannot be read fails, and the others go on."""
    store = run.parts.ledger.store
    for commit in await run.parts.ledger.do(store.commits, run.id):
        run.log.add(commit)
        run.state = replace(run.state, over_selection=commit.over_selection)
    if run.record.state in _ENDED:
        await _read_back_ended(run)
        return
    try:
        await _load(run)
    except (StoreAway, NoOpenFiles):
        raise  # nothing is wrong with the run: the next start reads it
    except StoreError as error:
        log.error("run_not_readable", run=run.id, error=str(error))
        run.begin()
        run.fail(f"its state cannot be read: {error}")
        return
    run.begin()
    await _tell(run)
    if run.state.phase is Phase.COLLECTING:
        attempts = await run.parts.ledger.do(store.attempts, run.id, run.state.round)
        run.round_began = attempts[0].opened_at
        run.deadline.take_up(attempts[-1].seconds_left)
        run.post(ev.PickedUp())
    restart_if_due(run)
    run.client_states.missing = frozenset(missing_members(run))


async def _tell(run: Run) -> None:
    """A line of history: the coordinator was away, and this is where the run goes on."""
    state, where = run.state, "between two rounds"
    if state.phase is Phase.COLLECTING:
        where = f"{len(state.admitted)} updates of {len(state.drawn)} clients are here"
    entry = HistoryRecord(time.time(), "coordinator", "run_recovered", run.id, f"round {state.round}: {where}")
    try:
        await run.parts.ledger.do(run.parts.ledger.store.add_history, entry)
    except StoreFull as error:
        log.warning("not_told", run=run.id, error=str(error))  # no reason not to go on


async def _read_norms(run: Run) -> None:
    """How long updates were, where a limit looks at it."""
    if run.config.round.max_relative_norm or run.config.round.max_relative_payload:
        commits = [run.log.commits[round_] for round_ in sorted(run.log.commits)]
        await run.parts.ledger.do(run.norms.read_back, run.parts.ledger.store, commits)


async def _read_back_ended(run: Run) -> None:
    """An ended run keeps no tensors; of a round that the end cut short it remembers that it was drawn."""
    done, ending = len(run.log.commits), (run.record.state, run.record.reason)
    attempts = await run.parts.ledger.do(run.parts.ledger.store.attempts, run.id, done)
    run.state = replace(
        run.state,
        round=done,
        attempt=max((attempt.attempt for attempt in attempts), default=0),
        goal=1 if attempts else 0,
        phase=Phase.ENDED,
        ending=ending,  # type: ignore[arg-type]
    )
    await let_go(run)
    await run.client_evaluations.make_up()
    if run.status == "completed":
        await prune(run)
    run.parts.metrics.told.over(run.id, run.record.ended_at or run.record.created_at)


async def _load(run: Run) -> None:
    """Tensors, the round under way, evaluations that are missing. Raises StoreError."""
    store = run.parts.ledger.store
    await load_model(run)
    await _read_norms(run)
    await _sweep(run)
    if run.behaviour.algorithm.keeps_client_state:
        commits, epoch = run.log.commits.values(), run.record.state_epoch
        await run.parts.ledger.do(run.client_states.read_back, store, commits, epoch)
    members = frozenset(run.client_states.members) if run.state.policy.population else frozenset()
    run.state = replace(
        run.state, round=run.model.snapshot.round + 1, paused=run.record.state == "paused", members=members
    )
    await _load_round(run)
    await _make_up_evaluation(run)


async def load_again(run: Run) -> None:
    """What an ended run needs to go on: its models, checked against the ledger as after a restart, and its norms.

    Raises StoreError where what was committed cannot be read.
    """
    async with run.turn:  # not before our turn: the end itself lets go of the model
        if run.ended and not run.model.loaded:
            await load_model(run)
            await _read_norms(run)


async def load_model(run: Run) -> None:
    """The newest checkpoint; the ledger must have as many commits, but for one."""
    store = run.parts.ledger.store
    done = await run.model.load(run.record.state_epoch)
    if done is not None and (commit := done.record).round not in run.log.commits:
        # The crash came between the checkpoint and the ledger's line on it.
        why = HistoryRecord(time.time(), "coordinator", "round_committed", run.id, f"round {commit.round}, recovered")
        await run.parts.ledger.do(store.commit, commit, why, done.left_out)
        run.parts.fleet.quarantine.read_back(await run.parts.ledger.do(store.standings))
        run.log.add(commit)
        run.state = replace(run.state, over_selection=commit.over_selection)
    rounds = run.model.snapshot.round + 1
    if rounds != len(run.log.commits):
        raise StoreError(
            f"the ledger has {len(run.log.commits)} committed rounds, the newest valid checkpoint is of round "
            f"{rounds - 1}: restore the state directory from a backup"
        )


async def _sweep(run: Run) -> None:
    """Remove what rounds that are committed have left in the spool."""
    for leftover in await run.parts.in_io(run.parts.spool.sweep):
        if leftover.key.run_id == run.id and leftover.key.round <= run.model.snapshot.round:
            await run.parts.in_io(run.parts.spool.remove_round, run.id, leftover.key.round)


async def _load_round(run: Run) -> None:
    """The round under way, in the exchange that it had come to."""
    store, fresh = run.parts.ledger.store, run.state
    run.state = await run.parts.ledger.do(recover_round, store, run.id, fresh, partial(_is_whole, run))
    if not await _sum_up_again(run):
        why = f"round {fresh.round}: bytes of an earlier exchange are torn or gone"
        entry = HistoryRecord(time.time(), "coordinator", "round_restarted", run.id, why)
        await run.parts.ledger.do(store.restart_round, run.record, fresh.round, entry)
        await run.model.prepare(0)
        run.state = fresh
    state = run.state
    updates = await run.parts.ledger.do(store.updates, run.id, state.round, state.exchange)
    if state.phase is Phase.COLLECTING:
        await _count_again(run)
    run.intake.refused = {update.client_id for update in updates if not update.admitted}
    run.intake.too_long = {update.client_id for update in updates if not update.admitted and update.reason == _NORM}
    # Who was lost before the restart, or refused, is not waited for; nor is who must not be drawn.
    never = run.intake.refused | run.client_states.kept_out(run.record.state_epoch)
    run.state = replace(state, out=state.outstanding - (set(run.parts.fleet.present()) - never))


async def _count_again(run: Run) -> None:
    """The bytes of the round under way, as far as they can be known."""
    store, state = run.parts.ledger.store, run.state
    for exchange in range(state.exchange + 1):
        updates = await run.parts.ledger.do(store.updates, run.id, state.round, exchange)
        run.log.picked_up(run.model.bytes_down, [update for update in updates if update.admitted])


async def _sum_up_again(run: Run) -> bool:
    """Reduce the earlier exchanges, of which the one under way sends the result; False if their bytes are not there."""
    store = run.parts.ledger.store
    for exchange in range(run.state.exchange):
        fixed = await run.parts.ledger.do(store.accepted, run.id, run.state.round, exchange)
        updates = await accepted_updates(run, exchange, tuple(fixed or ()))
        if not all([await run.parts.in_io(_is_whole, run, update) for update in updates]):
            return False
        await run.model.reduce(exchange, updates, update_paths(run, updates))
    return True


async def _make_up_evaluation(run: Run) -> None:
    await run.client_evaluations.make_up()
    latest, state = run.log.latest, run.state
    if latest is None:
        return
    server = evaluation_due(state, latest.round) and not has_evaluation(latest.metrics, "")
    clients = clients_due(state, latest.round) and not has_evaluation(latest.metrics, PREFIX)
    missing = {"server": server, "clients": clients}
    awaited = frozenset(by for by in awaited_evaluations(state, latest.round) if missing[by])
    if reason := reason_to_stop(run):
        # The crash came between an evaluation and the end that it means.
        run.state = replace(state, phase=Phase.EVALUATING)
        run.post(ev.EndRequested("completed", reason))
    elif awaited and state.phase is Phase.SELECTING:
        run.state = replace(state, phase=Phase.EVALUATING, awaited=awaited)
    if clients:
        whole = run.config.evaluation.clients_deadline_s
        await run.client_evaluations.begin(latest.round, after_restart(run, whole, latest.clients_seconds_left))
    if server:
        await start_evaluation(run)


def _is_whole(run: Run, update: UpdateRecord) -> bool:
    key = SpoolKey(update.run_id, update.round, update.exchange, update.client_id)
    try:
        return file_digest(run.parts.spool.path(key, update.digest)) == update.digest
    except NoOpenFiles:
        raise  # nothing is known of the update
    except (OSError, StoreError):
        return False
