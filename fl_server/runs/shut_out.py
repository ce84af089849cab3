"""The clients that a run does not wait for, although it lacks them: they cannot come, or will not soon."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from fl_server.clients.eligibility import fits
from fl_server.run_config import RunConfig
from fl_server.runs.context import RunContext
from fl_server.store.records import ClientRecord


def shut_out(context: RunContext, config: RunConfig, lost_since: float | None) -> dict[str, str]:
    """The clients with the run's task and labels that cannot be drawn, with the reason, in the order of id.

    Args:
        context: the run.
        config: its current configuration.
        lost_since: Unix seconds; clients that were not seen since then are lost. None: no client counts as lost.
    """
    found: dict[str, str] = {}
    for record in context.fleet.records.in_memory().values():
        allowed = replace(record, banned=False, draining=False)
        if fits(allowed, context.task, config.labels, context.method) and (why := _why(context, record, lost_since)):
            found[record.client_id] = why
    return dict(sorted(found.items()))


def _why(context: RunContext, record: ClientRecord, lost_since: float | None) -> str:
    """Why the client cannot be drawn; empty if it can, or may soon."""
    fleet, client = context.fleet, record.client_id
    if record.banned or record.draining:
        return "banned" if record.banned else "draining"
    if fleet.quarantine.seconds_left(client):
        return "in quarantine"
    if client in context.client_states.left_out:
        return "left out for lost client states"
    if lost_since is None or fleet.state(client) != "lost" or fleet.last_seen(record) > lost_since:
        return ""
    return f"lost for {(time.time() - fleet.last_seen(record)) / 60:.0f} minutes"


def described(clients: Mapping[str, str]) -> str:
    """A sentence about the clients without which a run goes on; empty for none."""
    if not clients:
        return ""
    kinds = Counter(why.partition(" for ")[0] for why in clients.values())
    client, why = next(iter(clients.items()))
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return f"goes on without {len(clients)} of its clients: {counts}; first {client}, {why}"
