"""Clients that left while the server's sum still has their state: SCAFFOLD's c_i, FedDyn's h_i.

Such a state never changes again, so the run stops short of the optimum, and no number of its own shows that. Operators
are warned once for each absence. Forgetting the client begins the states anew without it.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import structlog

from fl_server.store.base import HistoryRecord

if TYPE_CHECKING:
    from fl_server.run import Run

log = structlog.get_logger()

INTERVALS = 3
"""A client that is drawn at random waits longer than so many times the usual wait in one of twenty cases."""


def missing_members(run: Run) -> dict[str, int]:
    """Members that cannot be drawn now, by the committed rounds since they took part last, where these are many."""
    states = run.client_states
    if run.ended or not run.behaviour.algorithm.needs_population or not states.members:
        return {}
    after, rounds = rounds_until_missing(run), len(run.log.commits)
    away = {client: missed for client, missed in states.missed(rounds).items() if missed >= after}
    if not away:
        return {}
    here = set(run.parts.fleet.workforce.able(run.task, run.config.labels)) - states.left_out
    return {client: missed for client, missed in away.items() if client not in here}


def rounds_until_missing(run: Run) -> int:
    """Committed rounds without a member, after which it is missing: several times what chance alone explains."""
    section = run.config.round
    share = section.rate if section.sampling == "bernoulli" else section.clients_per_round / run.config.population
    return max(run.parts.config.states.missing_after, math.ceil(INTERVALS / min(1.0, share)))


async def look_for_missing(run: Run) -> None:
    """A round was committed: note who is missing, and warn of those that are newly so."""
    missing, states = missing_members(run), run.client_states
    states.missing = frozenset(missing)
    new = [client for client in missing if not states.warned(client)]
    if not new:
        return
    now, last = time.time(), len(run.log.commits) - 1
    whys = [
        HistoryRecord(now, "coordinator", "member_missing", run.id, warning(run.id, client, missing[client]))
        for client in new
    ]
    warned = [states.warn(client, last) for client in new]
    ledger = run.parts.ledger
    await ledger.insist(run.no_room, ledger.store.put_state_standings, warned, None, whys)
    states.keep(warned)
    log.warning(
        "members_missing", run=run.id, round=last, clients=len(new), first=min(new),
        why=warning(run.id, min(new), missing[min(new)]),
    )  # fmt: skip
    for client in new:
        await run.parts.fleet.note(client, warning(run.id, client, missing[client]))


def warning(run_id: str, client: str, rounds: int) -> str:
    """What is wrong, and what to do."""
    return (
        f"{client} has taken no part in run {run_id} for {rounds} committed rounds and cannot be drawn, but its client "
        f"state is part of the run's sum, which keeps the model from its optimum: if it does not come back, "
        f"`fl clients forget {client}` begins the states anew without it"
    )
