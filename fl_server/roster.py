"""Who is there: clients that are attached, clients that may come back, and clients that were given up.

    PRESENT --stream lost--> SUSPECT --reattach_grace--> LOST
       ^------- attached -------'------- attached --------'

A suspect still counts as present, so that a short cut changes no cohort. There is no clock here: time is an argument,
in seconds of any clock that does not jump.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from fl_server.sampling import by_id


class Presence(Enum):
    """What is known of a client's connection."""

    PRESENT = "present"
    """It is attached."""
    SUSPECT = "suspect"
    """Its stream is gone, or it has not come back since a restart; it may."""
    LOST = "lost"
    """It stayed away for longer than the grace."""


class Roster:
    """The clients that registered, and which of them can be reckoned with."""

    def __init__(self, reattach_grace_s: float) -> None:
        """`reattach_grace_s`: seconds that a client may be away before it is lost; 0: lost at the next tick."""
        if not reattach_grace_s >= 0:
            raise ValueError(f"expected a reattach_grace_s of 0 or more seconds, got {reattach_grace_s}")
        self._grace_s = reattach_grace_s
        self._presence: dict[str, Presence] = {}
        self._lost_at: dict[str, float] = {}
        """When each suspect will be lost."""
        self._expected: set[str] = set()
        """Suspects that `expect` named and that were not heard of since."""
        self._present: tuple[str, ...] | None = None
        """What `present` answered, until that changes."""

    def attached(self, client: str, now: float) -> None:
        """The client has a stream. `now` is told here as everywhere; a client that is there needs no clock."""
        del now
        self._set(client, Presence.PRESENT)

    def stream_lost(self, client: str, now: float) -> None:
        """The client's stream ended. Nothing changes unless it was PRESENT: a forgotten client's stream ends too."""
        if self._presence.get(client) is Presence.PRESENT:
            self._set(client, Presence.SUSPECT)
            self._lost_at[client] = now + self._grace_s

    def expect(self, clients: Iterable[str], now: float) -> None:
        """After a restart: those who were present before it. They are SUSPECT from now; who is known already stays."""
        for client in set(clients) - self._presence.keys():
            self._set(client, Presence.SUSPECT)
            self._lost_at[client] = now + self._grace_s
            self._expected.add(client)

    def forget(self, client: str) -> None:
        """The client leaves for good: nobody waits for it any more. An unknown one is no error."""
        self._clear(client)
        self._presence.pop(client, None)
        self._present = None

    def tick(self, now: float) -> tuple[str, ...]:
        """Give up the suspects whose grace is over. Returns them, newly LOST, in the order of id bytes."""
        lost = by_id(client for client, lost_at in self._lost_at.items() if lost_at <= now)
        for client in lost:
            self._set(client, Presence.LOST)
        return lost

    def next_tick(self, now: float) -> float | None:
        """Seconds until `tick` can find somebody lost, 0 if it would now; None while nobody is suspect."""
        return max(0.0, min(self._lost_at.values()) - now) if self._lost_at else None

    def present(self) -> tuple[str, ...]:
        """Who is PRESENT or SUSPECT, in the order of id bytes: the clients that may be drawn."""
        if self._present is None:
            self._present = by_id(client for client, state in self._presence.items() if state is not Presence.LOST)
        return self._present

    def __contains__(self, client: object) -> bool:
        """Whether the client is one of `present`."""
        return self._presence.get(client, Presence.LOST) is not Presence.LOST  # type: ignore[call-overload]

    def state_of(self, client: str) -> Presence | None:
        """What is known of a client; None if it never came, or was forgotten."""
        return self._presence.get(client)

    @property
    def settled(self) -> bool:
        """Everybody who was expected after the restart is back, or was given up."""
        return not self._expected

    def _set(self, client: str, presence: Presence) -> None:
        self._clear(client)
        # Coming and going inside the grace leaves `present` as it is: a fleet that comes back sorts nothing anew.
        if self._presence.get(client, Presence.LOST) is Presence.LOST or presence is Presence.LOST:
            self._present = None
        self._presence[client] = presence

    def _clear(self, client: str) -> None:
        self._lost_at.pop(client, None)
        self._expected.discard(client)
