"""Reports changes of the fleet to its listener: single events at once, changes of eligibility collected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

PAUSE_A_CLIENT_S = 20e-6
"""Seconds for each known client between two reports: when ten thousand clients come at once, all clients are checked
a few times, not ten thousand times."""


class FleetListener(Protocol):
    """Is informed when clients come and go."""

    def client_attached(self, client_id: str) -> None:
        """The client can be reached; push its outstanding work."""

    def client_available(self, client_id: str) -> None:
        """The client may train again; offer it again the work that it gave up and that is still wanted."""

    def client_released(self, client_id: str) -> None:
        """An operator lets the client take part again."""

    def client_gone(self, client_id: str, reason: str) -> None:
        """The client is lost, banned or forgotten; do not wait for it."""

    def fleet_changed(self) -> None:
        """Other clients may be eligible now."""


class FleetChanges:
    """Collects changes of eligibility, for each report makes every run check all clients. Lives on the event loop."""

    def __init__(self, known_clients: Callable[[], int], update_metrics: Callable[[], None]) -> None:
        """known_clients: how many clients there are. update_metrics: called before each report."""
        self.listener: FleetListener | None = None
        self.version = 0
        """Increases whenever some client's eligibility may have changed."""
        self._known_clients, self._update_metrics = known_clients, update_metrics
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = 0.0

    @property
    def reported(self) -> bool:
        """Whether the latest change has been reported."""
        return self._timer is None

    @property
    def shortest_pause_s(self) -> float:
        """Least time between two checks of all clients."""
        return PAUSE_A_CLIENT_S * self._known_clients()

    def changed(self, *, eligibility: bool = True) -> None:
        """eligibility: other clients may be eligible now, for which every run checks all clients."""
        self.version += eligibility
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._report)

    def attached(self, client_id: str) -> None:
        """Report that a client has attached."""
        if self.listener is not None:
            self.listener.client_attached(client_id)

    def available(self, client_id: str) -> None:
        """Report that a client may train again."""
        if self.listener is not None:
            self.listener.client_available(client_id)

    def released(self, client_id: str) -> None:
        """Report that an operator released a client."""
        if self.listener is not None:
            self.listener.client_released(client_id)

    def gone(self, client_id: str, reason: str) -> None:
        """Report that a client is lost, banned or forgotten."""
        if self.listener is not None:
            self.listener.client_gone(client_id, reason)
        self.changed()

    def _report(self) -> None:
        """Report all changes since the last time, and wait longer before the next report if this one took long."""
        loop = asyncio.get_running_loop()
        self._timer, began = None, loop.time()
        self._update_metrics()
        if self.listener is not None:
            self.listener.fleet_changed()
        self._pause_s = max(self.shortest_pause_s, 20 * (loop.time() - began))
