"""What a round computes beside the event loop: the sums of an exchange, the server step, the commit."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from fl_server import events as ev
from fl_server.client_states import RoundUpdates
from fl_server.ledger import until_room
from fl_server.norms import norms_of
from fl_server.runs.culprits import Culprits, Measured, of_overflow, outliers
from fl_server.runs.due_restarts import restart_if_due
from fl_server.spool import SpoolKey
from fl_server.step import Diverged, StepNorms
from fl_server.store.base import CommitRecord, HistoryRecord, UpdateRecord

if TYPE_CHECKING:
    from fl_server.run import Run

log = structlog.get_logger()


async def reduce_exchange(run: Run, command: ev.ReduceExchange) -> None:
    """Fix the accepted list, then sum up beside the loop."""
    await _fix(run, command.accepted)
    run.spawn(_compute_sums(run, command.accepted))


async def _compute_sums(run: Run, accepted: ev.Accepted) -> None:
    updates = await accepted_updates(run, run.state.exchange, accepted)
    if _found(run, outliers(run.config.round, run.norms, _measured(updates))):
        return
    try:
        paths = update_paths(run, updates)
        await until_room(run.no_room, lambda: run.model.reduce(run.state.exchange, updates, paths))
    except Diverged as error:
        _diverged(run, updates, error)
        return
    run.post(ev.ExchangeReduced())


def _measured(updates: Iterable[UpdateRecord]) -> list[Measured]:
    return [Measured(each.client_id, norms_of(each), each.clip_factor) for each in updates]


def _found(run: Run, culprits: Culprits) -> bool:
    """Whether updates have to be dropped; then that is under way."""
    if culprits:
        run.post(ev.CulpritsFound(culprits))
    return bool(culprits)


def _diverged(run: Run, updates: Iterable[UpdateRecord], error: Diverged) -> None:
    """Without the update that did it, if one did; else the run ends, and can be resumed."""
    if not _found(run, of_overflow(_measured(updates))):
        log.error("run_diverged", run=run.id, round=run.state.round, error=str(error))
        run.fail(f"{error}; `{run.remedy}` goes on from there")


async def step(run: Run, command: ev.Step) -> None:
    """Fix the accepted list, then compute beside the loop."""
    await _fix(run, command.accepted)
    run.spawn(_compute_step(run, command.accepted))


async def _fix(run: Run, accepted: ev.Accepted) -> None:
    store, state = run.parts.ledger.store, run.state
    await run.parts.ledger.insist(run.no_room, store.fix_accepted, run.id, state.round, state.exchange, accepted)


async def _compute_step(run: Run, accepted: ev.Accepted) -> None:
    updates = await accepted_updates(run, run.state.exchange, accepted)
    if _found(run, outliers(run.config.round, run.norms, _measured(updates))):
        return
    try:
        paths = update_paths(run, updates)
        norms = await until_room(run.no_room, lambda: run.model.step(updates, paths))
    except Diverged as error:
        _diverged(run, updates, error)
        return
    if norms.left_out:
        log.info("updates_left_out", run=run.id, round=run.state.round, clients=norms.left_out)
    _look_at_weights(run, norms, len(updates))
    run.tally.stepped(norms, [update.norm for update in updates])
    run.post(ev.Stepped())


def _look_at_weights(run: Run, norms: StepNorms, updates: int) -> None:
    """Say whose examples were capped; and who had more weight than all others together, where nothing caps it."""
    if norms.capped:
        run.tally.capped(len(norms.capped))
        log.info("weights_capped", run=run.id, round=run.state.round, clients=norms.capped)
    client, weight = norms.largest
    if weight > _MOST and updates > _FEW and not run.config.round.max_client_share:
        log.warning(
            "client_outweighs", run=run.id, round=run.state.round, client=client, share=round(weight, 4),
            why="it has more weight than all others together; round.max_client_share limits it",
        )  # fmt: skip


_MOST, _FEW = 0.5, 2


async def accepted_updates(run: Run, exchange: int, accepted: ev.Accepted) -> list[UpdateRecord]:
    """The ledger's lines of the accepted updates of the round under way, in the order of id bytes."""
    ledger = run.parts.ledger
    updates = await ledger.insist(run.no_room, ledger.store.updates, run.id, run.state.round, exchange)
    return [update for update in updates if (update.client_id, update.digest) in set(accepted)]


def update_paths(run: Run, updates: Iterable[UpdateRecord]) -> list[Path]:
    """Where the bytes of admitted updates lie."""
    return [
        run.parts.spool.path(SpoolKey(each.run_id, each.round, each.exchange, each.client_id), each.digest)
        for each in updates
    ]


async def commit(run: Run, command: ev.Commit) -> None:
    """Write the new model beside the loop."""
    del command
    run.spawn(_write_commit(run))


async def _write_commit(run: Run) -> None:
    state, now = run.state, time.time()
    updates = await accepted_updates(run, state.exchange, state.accepted)
    losses = [update.training_loss for update in updates if update.training_loss is not None]
    record = CommitRecord(
        run_id=run.id,
        round=state.round,
        committed_at=now,
        seconds=now - (run.round_began or now),
        attempts=state.attempt + 1,
        accepted=len(state.accepted),
        dropped=len(state.drawn) - len(state.accepted),
        training_loss=sum(losses) / len(losses) if losses else None,
        bytes_down=run.log.bytes_down,
        bytes_up=run.log.bytes_up,
        model_digest="",
        state_epoch=run.record.state_epoch,
        over_selection=state.over_selection,
        account=run.log.account.to_text(),
    )
    why = HistoryRecord(now, "coordinator", "round_committed", run.id, f"round {state.round}")
    record = await run.model.commit(record, why, run.no_room)
    run.waiting_for = ""
    run.round_began = 0.0
    run.intake.forget_failures()
    run.log.add(record)
    if state.exchange:
        await run.parts.ledger.insist(run.no_room, run.norms.read_back, run.parts.ledger.store, [record])
    else:
        run.norms.add(state.round, [norms_of(update) for update in updates])
    if run.behaviour.algorithm.keeps_client_state:
        run.client_states.count(RoundUpdates(record.state_epoch, updates))
        restart_if_due(run)
    run.post(ev.Committed())
    # The ledger takes one thing after the other: this is known before the next round's first update can be refused.
    standings = await run.parts.ledger.insist(run.no_room, run.parts.ledger.store.standings)
    run.parts.fleet.quarantine.read_back(standings)
