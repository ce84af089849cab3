"""Clients that left while the server's sum still has their state: SCAFFOLD's c_i, FedDyn's h_i.

Such a state never changes again, so the run stops short of the optimum, and no metric of the run shows it. Operators
are warned once for each absence. Forgetting the client restarts the states without it.
"""

from __future__ import annotations

import math
import time

import structlog

from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.store.records import HistoryRecord

log = structlog.get_logger()

INTERVALS = 3
"""A client that is drawn at random waits longer than so many times the usual interval in one of twenty cases."""


def missing_members(context: RunContext, control: RunControl) -> dict[str, int]:
    """Members that cannot be drawn now, with the committed rounds since they took part last, if these are many."""
    states = context.client_states
    if control.ended or not context.algorithm.needs_population or not states.members:
        return {}
    after, rounds = rounds_until_missing(context, control), context.log.rounds
    away = {client: missed for client, missed in states.rounds_missed(rounds).items() if missed >= after}
    if not away:
        return {}
    requires = control.eligible.selection().requires
    here = set(context.fleet.eligibility.able_clients(requires)) - states.left_out
    return {client: missed for client, missed in away.items() if client not in here}


def rounds_until_missing(context: RunContext, control: RunControl) -> int:
    """Committed rounds without a member after which it is missing: several times the usual interval."""
    section = control.config.round
    share = section.rate if section.sampling == "bernoulli" else section.clients_per_round / control.config.population
    return max(context.services.config.states.missing_after, math.ceil(INTERVALS / min(1.0, share)))


async def warn_of_missing_members(context: RunContext, control: RunControl) -> None:
    """After a commit: update the missing members, and warn of those that are newly missing."""
    missing, states = missing_members(context, control), context.client_states
    states.missing = frozenset(missing)
    new = [client for client in missing if not states.warned(client)]
    if not new:
        return
    now, last, run_id = time.time(), context.log.rounds - 1, context.run_id
    whys = [
        HistoryRecord(now, "coordinator", "member_missing", run_id, warning(run_id, client, missing[client]))
        for client in new
    ]
    warned = [states.after_warning(client, last) for client in new]
    await control.write(context.store.put_client_state_records, warned, None, whys)
    states.keep(warned)
    log.warning(
        "members_missing", run=run_id, round=last, clients=len(new), first=min(new),
        why=warning(run_id, min(new), missing[min(new)]),
    )  # fmt: skip
    for client in new:
        await context.fleet.note(client, warning(run_id, client, missing[client]))


def warning(run_id: str, client: str, rounds: int) -> str:
    """The problem, and what to do about it."""
    return (
        f"{client} has taken no part in run {run_id} for {rounds} committed rounds and cannot be drawn, but its client "
        f"state is part of the run's sum, which keeps the model from its optimum: if it does not come back, "
        f"`fl clients forget {client}` restarts the states without it"
    )
