"""Tells operators of clients with far fewer counted updates than they are due."""

from __future__ import annotations

import time

import structlog

from fl_server.runs.committed.shares import Share
from fl_server.runs.context import RunContext
from fl_server.runs.control import RunControl
from fl_server.store.records import HistoryRecord

log = structlog.get_logger()


async def warn_of_low_shares(context: RunContext, control: RunControl) -> None:
    """After a commit: once for each client, by the run's history, the log and a note on the client."""
    shares = context.log.shares
    shares.look()
    for client in sorted(shares.too_low.keys() - shares.told, key=str.encode):
        shares.told.add(client)
        why = warning(context.run_id, client, shares.too_low[client], control.config.round.close)
        log.warning("client_below_due", run=context.run_id, client=client, why=why)
        row = HistoryRecord(time.time(), "coordinator", "client_below_due", context.run_id, why)
        context.fleet.records.write_history_later(row)
        await context.fleet.note(client, why)


def warning(run_id: str, client: str, share: Share, close: str) -> str:
    """The problem, and what to do about it."""
    remedy = f"`fl clients show {client}` has its latest work"
    if close == "goal":
        remedy = 'others are faster; close = "cohort" waits for it, and over_selection near 1 prefers them less'
    return (
        f"{client} has {share.counted} counted updates in run {run_id} and is due {share.due:.1f}, so the model learns "
        f"little of its data: {remedy}"
    )
