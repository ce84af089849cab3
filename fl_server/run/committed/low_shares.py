"""Tells operators of clients with far fewer counted updates than they are due."""

from __future__ import annotations

import time

import structlog

from fl_server.run.committed.lookup import clients_told_of
from fl_server.run.committed.shares import Share
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.store.records import HistoryRecord

log = structlog.get_logger()

_EVENT = "client_below_due"


async def warn_of_low_shares(context: RunContext, control: RunControl) -> None:
    """After a commit and a restart: once for each client, by the run's history, the log and a note on the client."""
    shares = context.log.shares
    shares.look()
    if not shares.too_low:
        return
    if shares.told is None:
        shares.told = await clients_told_of(context, control, _EVENT)
    for client in sorted(shares.too_low.keys() - shares.told, key=str.encode):
        why = warning(context.run_id, client, shares.too_low[client], control.config.round.close)
        log.warning(_EVENT, run=context.run_id, client=client, why=why)
        await context.fleet.note(client, why)
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
