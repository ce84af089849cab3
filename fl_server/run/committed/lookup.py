"""Committed rounds of a run that are not in memory: read from the ledger when they are needed."""

from __future__ import annotations

from collections.abc import Sequence

from fl_server.run.committed.shares import Draw
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.store.records import CommitRecord

ROUNDS_AT_ONCE = 1000


async def restore_log(context: RunContext, extended_at: int) -> None:
    """Restore the log of a run at a start: the totals of settled rounds, then the commits after them.

    Rounds with evaluations by clients that are not summarised yet count as being evaluated.

    extended_at: the run's committed rounds at its last extension.
    """
    ledger, store, log = context.services.ledger, context.store, context.log
    if (totals := await ledger.do(store.totals, context.run_id)) is not None:
        log.restore(totals)
    for round_ in await ledger.do(store.rounds_to_summarise, context.run_id, log.rounds):
        log.being_evaluated[round_] += 1
    while commits := await ledger.do(store.commits, context.run_id, log.rounds, ROUNDS_AT_ONCE):
        draws = await ledger.do(store.draws, context.run_id, commits[0].round, commits[-1].round)
        for commit in commits:
            log.add(commit, extended_at, Draw(*draws[commit.round]) if commit.round in draws else None)
    log.shares.look()
    if (due := log.totals_due(context.run_id)) is not None:  # they are not written, or of another criterion
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
    if (recent := context.log.recent.get(round_)) is not None:
        return recent
    if not 0 <= round_ < context.log.rounds:
        return None
    found = await context.services.ledger.do(context.store.commits, context.run_id, round_, 1)
    return found[0] if found else None


async def state_epochs(context: RunContext, rounds: Sequence[int]) -> dict[int, int]:
    """The epochs of client states in committed rounds."""
    recent = {each: context.log.recent[each].state_epoch for each in rounds if each in context.log.recent}
    if not (others := [each for each in rounds if each not in recent]):
        return recent
    return {**await context.services.ledger.do(context.store.state_epochs, context.run_id, others), **recent}
