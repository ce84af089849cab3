"""Committed rounds, read from the ledger when they are needed, and clients that count in too few of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog

from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.run.round_statistics import Draw, Share
from fl_server.store.records import CommitRecord, HistoryRecord

ROUNDS_AT_ONCE = 1000


async def restore_rounds(context: RunContext, extended_at: int) -> None:
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


async def clients_told_of(context: RunContext, control: RunControl, event: str) -> set[str]:
    """The clients that lines of an event in the run's history begin with.

    A kill may prevent a line that is written in the background. So the history says who was told of, also after a
    restart.
    """
    details = await control.read(context.store.history_details, context.run_id, event)
    return {detail.split(maxsplit=1)[0].removesuffix(":") for detail in details if detail}


async def draw_of(context: RunContext, round_: int) -> Draw | None:
    """Whom a committed round drew and counted; None if the ledger does not have it."""
    found = await context.services.ledger.do(context.store.draws, context.run_id, round_, round_)
    return Draw(*found[round_]) if round_ in found else None


async def committed_round(context: RunContext, round_: int) -> CommitRecord | None:
    """The commit of a round; None if the round is not committed."""
    if (recent := context.rounds.recent.get(round_)) is not None:
        return recent
    if not 0 <= round_ < context.rounds.committed:
        return None
    found = await context.services.ledger.do(context.store.commits, context.run_id, round_, 1)
    return found[0] if found else None


async def state_epochs(context: RunContext, rounds: Sequence[int]) -> dict[int, int]:
    """The epochs of client states in committed rounds."""
    recent = {each: context.rounds.recent[each].state_epoch for each in rounds if each in context.rounds.recent}
    if not (others := [each for each in rounds if each not in recent]):
        return recent
    return {**await context.services.ledger.do(context.store.state_epochs, context.run_id, others), **recent}


log = structlog.get_logger()

_EVENT = "client_below_due"


async def warn_of_low_shares(context: RunContext, control: RunControl) -> None:
    """After a commit and a restart: once for each client, by the run's history, the log and a note on the client."""
    shares = context.rounds.shares
    shares.look()
    if not shares.too_low:
        return
    if shares.told is None:
        shares.told = await clients_told_of(context, control, _EVENT)
    for client in sorted(shares.too_low.keys() - shares.told, key=str.encode):
        why = warning(context.run_id, client, shares.too_low[client], control.config.round.close)
        log.warning(_EVENT, run=context.run_id, client=client, why=why)
        await context.fleet.records.write_note(client, why)
        shares.told.add(client)
        row = HistoryRecord(time.time(), "coordinator", _EVENT, context.run_id, why)
        context.fleet.records.write_history_later(row)


def warning(run_id: str, client: str, share: Share, close: str) -> str:
    """The problem, and what to do about it."""
    remedy = f"`fl clients show {client}` has its latest work"
    if close == "goal":
        remedy = 'others are faster; close = "cohort" waits for it, and over_selection near 1 prefers them less'
    return (
        f"{client} has {share.counted} counted updates in run {run_id} and is due {share.due:.1f}, so the model learns "
        f"little of its data: {remedy}"
    )
