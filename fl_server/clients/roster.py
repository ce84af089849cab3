"""Presence: which clients are attached, which may come back, and which were given up.

    PRESENT --stream lost--> SUSPECT --reattach_grace--> LOST
       ^------- attached -------'------- attached --------'

A suspect still counts as present, so that a short interruption changes no cohort. There is no clock here: `now` is an
argument, in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum

from fl_server.rounds.sampling import by_id


class Presence(Enum):
    """The state of a client's connection."""

    PRESENT = "present"
    """It is attached."""
    SUSPECT = "suspect"
    """Its stream is gone, or it has not come back since a restart."""
    LOST = "lost"
    """It was away for longer than the grace."""


class Roster:
    """The presence of all registered clients."""

    def __init__(self, reattach_grace_s: float) -> None:
        """reattach_grace_s: a client is lost after being away for this long; 0: at the next tick."""
        if not reattach_grace_s >= 0:
            raise ValueError(f"expected a reattach_grace_s of 0 or more seconds, got {reattach_grace_s}")
        self._grace_s = reattach_grace_s
        self._presence: dict[str, Presence] = {}
        self._lost_at: dict[str, float] = {}
        """When each suspect will be lost."""
        self._expected: set[str] = set()
        """Suspects of `expect` that have not come back."""
        self._present: tuple[str, ...] | None = None
        """The cached result of `present`."""
        self._counts: Counter[Presence] = Counter()
        self._watcher: Callable[[str], None] = lambda _: None

    def watch(self, watcher: Callable[[str], None]) -> None:
        """Call `watcher` with the id of each client that is one of `present` now, or is no more."""
        self._watcher = watcher

    def count(self, presence: Presence) -> int:
        """The number of clients in a state."""
        return self._counts[presence]

    def attached(self, client: str, now: float) -> None:
        """The client has a stream. `now` is unused; every transition has it."""
        del now
        self._set(client, Presence.PRESENT)

    def stream_lost(self, client: str, now: float) -> None:
        """The client's stream ended. A client that is not PRESENT, such as a forgotten one, does not change."""
        if self._presence.get(client) is Presence.PRESENT:
            self._set(client, Presence.SUSPECT)
            self._lost_at[client] = now + self._grace_s

    def expect(self, clients: Iterable[str], now: float) -> None:
        """Clients that were present before a restart are SUSPECT from now. Known clients do not change."""
        for client in set(clients) - self._presence.keys():
            self._set(client, Presence.SUSPECT)
            self._lost_at[client] = now + self._grace_s
            self._expected.add(client)

    def forget(self, client: str) -> None:
        """Remove a client. An unknown one is no error."""
        self._clear(client)
        if (before := self._presence.pop(client, None)) is not None:
            self._counts[before] -= 1
        self._present = None
        self._watcher(client)

    def tick(self, now: float) -> tuple[str, ...]:
        """Give up the suspects whose grace is over. Returns these newly LOST clients in the order of id bytes."""
        lost = by_id(client for client, lost_at in self._lost_at.items() if lost_at <= now)
        for client in lost:
            self._set(client, Presence.LOST)
        return lost

    def next_tick(self, now: float) -> float | None:
        """Seconds until `tick` may find a lost client, 0 if it would now; None without suspects."""
        return max(0.0, min(self._lost_at.values()) - now) if self._lost_at else None

    def present(self) -> tuple[str, ...]:
        """Clients that are PRESENT or SUSPECT, in the order of id bytes."""
        if self._present is None:
            self._present = by_id(client for client, state in self._presence.items() if state is not Presence.LOST)
        return self._present

    def __contains__(self, client: object) -> bool:
        """Whether the client is one of `present`."""
        return isinstance(client, str) and self._presence.get(client, Presence.LOST) is not Presence.LOST

    def state_of(self, client: str) -> Presence | None:
        """A client's presence; None if it never registered, or was forgotten."""
        return self._presence.get(client)

    @property
    def settled(self) -> bool:
        """Whether every expected client is back or was given up."""
        return not self._expected

    def _set(self, client: str, presence: Presence) -> None:
        self._clear(client)
        # A change between PRESENT and SUSPECT keeps the cached result: a fleet that comes back is not sorted again.
        before = self._presence.get(client)
        self._presence[client] = presence
        self._counts[presence] += 1
        if before is not None:
            self._counts[before] -= 1
        if (before in (None, Presence.LOST)) != (presence is Presence.LOST):
            self._present = None
            self._watcher(client)

    def _clear(self, client: str) -> None:
        self._lost_at.pop(client, None)
        self._expected.discard(client)
