"""The clients that a run may draw, and those that are reserved for it because they work for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from fl_server.clients.eligibility import fits
from fl_server.rounds import events as ev
from fl_server.rounds.state import RoundState
from fl_server.run.context import RunContext
from fl_server.run_config import RunConfig
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


class EligibleClients:
    """Keeps the state machine's eligible clients and the fleet's reserved clients current. Lives on the event loop."""

    def __init__(self, context: RunContext, config: RunConfig, state: RoundState) -> None:
        """config: its labels and its task stay the same for the life of the run."""
        self._context, self._config = context, config
        self._version = -1
        """The fleet's version that `state.eligible` was computed from; -1: compute it again."""
        self._reserved = state
        """The state whose working clients are reserved."""
        self._began = time.time()
        """No client was lost for longer: before, the coordinator or the run was not here to be found."""
        self.without = ""
        """The clients without which the run goes on, as a sentence; empty if it has all that it needs."""

    def invalidate(self) -> None:
        """Compute the eligible clients again before the next event."""
        self._version = -1

    def changed(self, state: RoundState, *, draining: bool) -> ev.RosterChanged | None:
        """The event for the state machine if other clients can be drawn since the last call; None if not.

        draining: the coordinator is about to stop, and no client gets new work.
        """
        fleet = self._context.fleet
        if self._version == fleet.version:
            return None
        self._version = fleet.version
        eligible, settled = self.now(), fleet.settled and not draining
        missing = self._shut_out(state, sum(client not in state.lost for client in eligible))
        if (eligible, settled, missing) == (state.eligible, state.settled, state.shut_out):
            return None
        return ev.RosterChanged(eligible, settled, missing)

    def _shut_out(self, state: RoundState, here: int) -> int:
        """The number of clients that the run lacks and does not wait for; 0 if it lacks none.

        A client that is lost counts from the second round on: to begin, a run waits for those that are not here yet.
        """
        after = self._context.services.config.limits.lost_after_s
        if here >= state.policy.min_clients:
            self.without = ""
            return 0
        long_ago = time.time() - after
        since = long_ago if state.round and long_ago >= self._began else None
        clients = shut_out(self._context, self._config, since)
        self.without = described(clients)
        return len(clients)

    def now(self) -> tuple[str, ...]:
        """Clients that are here for the run. Which of them it draws is decided by the round state machine."""
        context, labels = self._context, self._config.labels
        eligible = context.fleet.eligibility.eligible(context.run_id, context.task, labels, context.method)
        left_out = context.client_states.left_out
        return tuple(client for client in eligible if client not in left_out) if left_out else eligible

    def reserve(self, state: RoundState) -> None:
        """Reserve the cohort before anything is awaited: no other run may draw clients that work for this one."""
        fleet = self._context.fleet
        up_to_date = self._version == fleet.version
        begun, done = state.workers_since(self._reserved)
        fleet.eligibility.change_workers(self._context.run_id, begun, done)
        self._reserved = state
        if up_to_date:
            self._version = fleet.version
