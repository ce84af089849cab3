"""Restores a run after a restart: its models, limits of norms and evaluations, and where it continues."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import structlog

from algorithms import AlgorithmError
from fl_common.units import counted
from fl_server.rounds import events as ev
from fl_server.rounds.by_client import ByClient, Lost
from fl_server.rounds.committing import clients_due, evaluation_due
from fl_server.rounds.metrics import PREFIX, has_evaluation
from fl_server.rounds.restoring import with_evaluations
from fl_server.rounds.selecting import next_round
from fl_server.rounds.state import Phase
from fl_server.run.client_warnings import missing_members, warn_of_low_shares
from fl_server.run.context import RunContext
from fl_server.run.effects import release_round
from fl_server.run.evaluations import prune_checkpoints
from fl_server.run.failures import time_after_restart
from fl_server.run.restore_round import restore_round_under_way, resume_deadline
from fl_server.run.run import Run
from fl_server.run.totals import Draw
from fl_server.store.errors import StoreError, StoreFull
from fl_server.store.records import ENDED, CommitRecord, HistoryRecord
from fl_tasks import TaskError
from fl_tasks.errors import is_own_fault

log = structlog.get_logger()


async def restore_run(run: Run) -> str:
    """Restore the run at the point that the ledger records; then calls about it can be answered, and `continue_run`.

    Returns why the run fails: its state is unreadable, or its code fails; empty if it goes on or is over. Raises
    TaskError, AlgorithmError if the machine lacks something, or if its code did not end in its time.
    """
    context = run.context
    await _restore_rounds(context, run.record.extended_at)
    run.state = replace(
        run.state,
        over_selection=0.0 if run.rounds.latest is None else run.rounds.latest.over_selection,
        judged_from=run.record.extended_at,
        metric_seen=run.rounds.newest_round_with(run.config.stop.metric) is not None,
    )
    latest = await context.services.ledger.do(context.store.latest_failure, run.id)
    run.submissions.failures.restore((), latest)
    async with run.turn:
        if run.record.state in ENDED:
            await _restore_ended(run)
            return ""
        return await _why_failed(run, _restore_running(run))


async def continue_run(run: Run, failure: str) -> None:
    """Start a run that is restored. failure: what `restore_run` returned. Raises TaskError, AlgorithmError as there."""
    async with run.turn:
        if run.ended:
            return
        if why := failure or await _why_failed(run, _restore_evaluations(run)):
            run.start()
            run.fail(why)
        else:
            await _start(run)


async def _why_failed(run: Run, work: Coroutine[Any, Any, None]) -> str:
    """Do a part of the restoring. Returns why the run fails; empty if it does not."""
    try:
        await work
    except StoreFull:
        raise  # nothing is wrong with the run: it is read again when disk, database and store are there
    except StoreError as error:
        log.error("run_not_readable", run=run.id, error=str(error))
        return f"its state cannot be read: {error}"
    except (TaskError, AlgorithmError) as error:
        if not is_own_fault(error):
            raise
        log.error("run_code_failed", run=run.id, error=str(error))
        return str(error)
    return ""


async def _start(run: Run) -> None:
    """Start a run whose state can be read, with what the crash cut short."""
    context = run.context
    run.start()
    await _record_restart(run)
    if run.state.phase is Phase.COLLECTING or run.state.staged or run.state.work:
        await resume_deadline(run)
    run.post(ev.RoundRestored())
    if run.record.stopping:
        run.post(ev.EndRequested("stopped", run.record.stopping))
    for client in sorted(run.state.members):
        if (known := context.fleet.records.find(client)) is None or known.banned:
            # It was removed while a step was computed, after which the states were to restart.
            why = f"{client} was {'forgotten' if known is None else 'banned'}, and with it its state"
            run.post(ev.StatesLost(why, run.state.state_epoch))
    run.client_states.missing = frozenset(missing_members(context, run))
    await warn_of_low_shares(context, run)


async def reload_ended(run: Run) -> None:
    """Load what an ended run needs to continue: its models, checked against the ledger, and its norms.

    The caller holds the run's turn. Raises StoreError if what was committed cannot be read.
    """
    if run.ended and not run.model.loaded:
        await _load_model(run)
        # From the ledger, as after a restart: a run that failed may have left a command half done.
        await _restore_ended_state(run)


async def _restore_ended(run: Run) -> None:
    """An ended run has no tensors in memory."""
    context = run.context
    ending = (run.record.state, run.record.reason)
    run.state = replace(run.state, ending=ending)  # type: ignore[arg-type]  # ENDED has the values of EndStatus
    await _restore_ended_state(run)
    await release_round(context, run)
    await run.client_evaluations.backfill()
    if run.status != "failed":
        await make_up_last_evaluations(run)
    if run.status == "completed":
        await prune_checkpoints(context, run)
    await warn_of_low_shares(context, run)
    context.metrics.reported.ended(run.id, run.record.ended_at or run.record.created_at)


async def _restore_ended_state(run: Run) -> None:
    """The state after the last commit. Of a round that the end cut short, only its draw is restored."""
    context, done = run.context, run.rounds.committed
    attempts = await context.services.ledger.do(context.store.attempts, run.id, done)
    run.state = replace(
        next_round(run.state),
        round=done,
        attempt=max((attempt.attempt for attempt in attempts), default=0),
        goal=1 if attempts else 0,
        phase=Phase.ENDED,
        awaited=frozenset(),
        states_lost="",
    )
    run.rounds.began = None
    run.rounds.bytes.resume(run.record.bytes_down, run.record.bytes_up)


async def _restore_running(run: Run) -> None:
    """Restore tensors and the round under way. Raises StoreError, TaskError, AlgorithmError."""
    context = run.context
    await _load_model(run)
    await _remove_committed_uploads(run)
    if context.keeps_client_state:
        epoch, population = run.record.state_epoch, run.state.policy.population
        rounds = range(run.rounds.committed - run.rounds.rounds_of_epoch(epoch), run.rounds.committed)
        await context.services.ledger.do(run.client_states.restore, context.store, rounds, epoch, population)
    run.state = replace(run.state, round=run.model.snapshot.round + 1, paused=run.record.state == "paused")
    if run.state.policy.population:
        states = run.client_states
        lost = {
            standing.client_id: Lost(standing.reason, states.lost_too_often(standing))
            for standing in states.awaiting_restart(run.record.state_epoch)
        }
        run.state = replace(run.state, members=frozenset(states.members), lost=ByClient(lost))
    await restore_round_under_way(run)


async def _record_restart(run: Run) -> None:
    """Write to the history where the run continues."""
    state, where = run.state, "between two rounds"
    if state.phase is Phase.COLLECTING:
        here = f"updates of {state.collected} of {counted(len(state.drawn), 'client')} are here"
        where = "its updates are collected" if run.context.hides_cohorts else here
    entry = HistoryRecord(time.time(), "coordinator", "run_recovered", run.id, f"round {state.round}: {where}")
    try:
        await run.context.services.ledger.do(run.context.store.add_history, entry)
    except StoreFull as error:
        log.warning("not_told", run=run.id, error=str(error))  # no reason not to continue


# Models and norms.


async def _load_model(run: Run) -> None:
    """Load the newest checkpoint. The ledger must have as many commits, or one less."""
    context, store = run.context, run.context.store
    ledger = context.services.ledger
    newest = await run.model.load(run.config, run.record.state_epoch)
    if newest is not None and (commit := newest.record).round >= run.rounds.committed:
        # The crash came between the checkpoint and its row in the ledger.
        why = HistoryRecord(time.time(), "coordinator", "round_committed", run.id, f"round {commit.round}, recovered")
        await ledger.do(store.commit, commit, why, newest.left_out)
        context.fleet.quarantine.restore(await ledger.do(store.quarantine_records))
        run.rounds.add(commit, run.record.extended_at, await context.draw_of(commit.round))
    elif newest is not None and (kept := run.rounds.latest) is not None and kept.round == newest.record.round:
        _check_averaged(kept, newest.record)
    latest = run.rounds.latest
    run.state = replace(
        run.state,
        over_selection=0.0 if latest is None else latest.over_selection,
        epoch_rounds=run.rounds.rounds_of_epoch(run.record.state_epoch),
    )
    context.norms.put_back(latest.norms if latest else "")
    rounds = run.model.snapshot.round + 1
    if rounds != run.rounds.committed:
        raise StoreError(
            f"the ledger has {counted(run.rounds.committed, 'committed round')}, the newest valid checkpoint "
            "is of round "
            f"{rounds - 1}: restore the state directory from a backup"
        )


def _check_averaged(kept: CommitRecord, loaded: CommitRecord) -> None:
    """Raises StoreError if the sums in the checkpoint make another averaged model than the ledger has."""
    if loaded.averaged_digest != kept.averaged_digest:
        raise StoreError(
            f"the averaged model of round {kept.round} is {kept.averaged_digest} in the ledger, and the checkpoint has"
            f" {loaded.averaged_digest}: restore the state directory from a backup"
        )


async def _remove_committed_uploads(run: Run) -> None:
    """Remove the files of committed rounds from the spool."""
    services, first = run.context.services, run.model.snapshot.round + 1 - run.state.policy.max_staleness
    for leftover in await services.in_io(services.spool.sweep, run.id):
        if leftover.key.round < first:
            await services.in_io(services.spool.remove_round, run.id, leftover.key.round)


_MADE_UP = 2
"""Most evaluations of earlier rounds that were under way or waiting when the coordinator stopped."""


async def _restore_evaluations(run: Run) -> None:
    """Start evaluations of the latest round again that the crash cut short, or end the run as they demand."""
    await run.client_evaluations.backfill()
    latest, state = run.rounds.latest, run.state
    if latest is None:
        return
    server = evaluation_due(state, latest.round) and not has_evaluation(latest.metrics, "")
    clients = clients_due(state, latest.round) and not has_evaluation(latest.metrics, PREFIX)
    missing: set[ev.Source] = {*(("server",) if server else ()), *(("clients",) if clients else ())}
    run.state = with_evaluations(state, *run.rounds.evaluations(run.record.extended_at), missing)
    for earlier in await _not_evaluated(run):
        run.server_evaluation.make_up(earlier)
    if clients:
        whole = run.config.evaluation.clients_deadline_s
        seconds = time_after_restart(run.context, whole, latest.clients_seconds_left)
        await run.client_evaluations.start(latest.round, seconds)
    if server:
        run.server_evaluation.start()


async def make_up_last_evaluations(run: Run) -> None:
    """Evaluate the last models whose evaluations were under way or waiting when the run ended, and then cut short."""
    latest, before = run.rounds.latest, replace(run.state, ending=None)
    last = latest and evaluation_due(before, latest.round) and not has_evaluation(latest.metrics, "")
    for round_ in (*await _not_evaluated(run), *([latest.round] if latest and last else [])):
        run.server_evaluation.make_up(round_)


async def _not_evaluated(run: Run) -> list[int]:
    """Rounds before the latest one whose evaluation by the server was due and did not end before the restart."""
    every, missing, latest = run.state.policy.evaluate_every, list[int](), run.rounds.latest
    newest = latest.round // every * every - 1 if latest and every else -1
    for round_ in range(newest, -1, -every)[:_MADE_UP] if every else ():
        commit = await run.context.commit_of(round_)
        if commit is None or has_evaluation(commit.metrics, ""):
            break
        missing.insert(0, round_)
    return missing


ROUNDS_AT_ONCE = 1000


async def _restore_rounds(context: RunContext, extended_at: int) -> None:
    """Restore the rounds of a run at a start: the totals of settled rounds, then the commits after them.

    Rounds with evaluations by clients that are not summarised yet count as being evaluated.

    extended_at: the run's committed rounds at its last extension.
    """
    ledger, store, rounds = context.services.ledger, context.store, context.rounds
    if (totals := await ledger.do(store.totals, context.run_id)) is not None:
        rounds.restore(totals)
    for round_ in await ledger.do(store.rounds_to_summarise, context.run_id, rounds.committed):
        rounds.being_evaluated[round_] += 1
    while commits := await ledger.do(store.commits, context.run_id, rounds.committed, ROUNDS_AT_ONCE):
        draws = await ledger.do(store.draws, context.run_id, commits[0].round, commits[-1].round)
        for commit in commits:
            rounds.add(commit, extended_at, Draw(*draws[commit.round]) if commit.round in draws else None)
    rounds.shares.look()
    if (due := rounds.totals_due(context.run_id)) is not None:  # they are not written, or of another criterion
        await ledger.do(store.put_totals, due)
