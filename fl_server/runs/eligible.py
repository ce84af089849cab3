"""The clients that a run may draw, and those that are reserved for it because they work for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fl_server.rounds import events as ev
from fl_server.rounds.state import RoundState
from fl_server.run_config import RunConfig
from fl_server.runs.context import RunContext
from fl_server.store.records import RunRecord


class Drawing(Protocol):
    """The run that draws."""

    record: RunRecord
    """The run's row in the ledger. A part that replaces it has written the new row first."""

    @property
    def config(self) -> RunConfig:
        """The current configuration. Extending or resuming a run replaces it, so it is read at each use."""

    @property
    def state(self) -> RoundState:
        """The state of the round state machine."""

    @property
    def ended(self) -> bool:
        """Whether the run is over."""

    @property
    def draining(self) -> bool:
        """Whether the coordinator is about to stop: no client gets new work."""

    async def take(self, event: ev.Event) -> bool:
        """Process an event that applies at once. The caller holds the run's turn. Returns False if the run failed."""


class EligibleClients:
    """Keeps the state machine's eligible clients and the fleet's reserved clients current. Lives on the event loop."""

    def __init__(self, context: RunContext, run: Drawing, refused: Callable[[], set[str]]) -> None:
        """`refused`: the clients that were refused in the round under way, which are not drawn for it again."""
        self._context, self._run, self._refused = context, run, refused
        self._version = -1
        """The fleet's version that `state.eligible` was computed from; -1: compute it again."""
        self._reserved = run.state
        """The state whose working clients are reserved."""

    def invalidate(self) -> None:
        """Compute the eligible clients again before the next event."""
        self._version = -1

    async def refresh(self) -> None:
        """Compute the eligible clients now. The caller holds the run's turn."""
        self.invalidate()
        await self.update()

    async def update(self) -> None:
        """Pass the eligible clients to the state machine until they are current: other runs draw during each wait."""
        run, fleet = self._run, self._context.fleet
        while not run.ended and self._version != fleet.version:
            self._version = fleet.version
            eligible, settled = self.now(), fleet.settled and not run.draining
            if (eligible, settled) != (run.state.eligible, run.state.settled):
                await run.take(ev.RosterChanged(eligible, settled))

    def now(self) -> tuple[str, ...]:
        """Clients that could be drawn now."""
        context, run = self._context, self._run
        eligible = context.fleet.eligibility.eligible(context.run_id, context.task, run.config.labels, context.method)
        never = self._refused() | context.client_states.excluded(run.record.state_epoch)
        return tuple(client for client in eligible if client not in never) if never else eligible

    def reserve(self) -> None:
        """Reserve the cohort before anything is awaited: no other run may draw clients that work for this one."""
        state, fleet = self._run.state, self._context.fleet
        up_to_date = self._version == fleet.version
        begun, done = state.workers_since(self._reserved)
        fleet.eligibility.change_workers(self._context.run_id, begun, done)
        self._reserved = state
        if up_to_date:
            self._version = fleet.version
