"""The door that clients register through: at a steady pace, so that a fleet that comes back at once is no herd.

Whoever comes when too many have come is given a time of its own, and is let in then. A fleet that is smaller than what
fits into `BURST_S` never sees the door. There is no clock here: time is an argument, in seconds of any clock that does
not jump.
"""

from __future__ import annotations

BURST_S = 2.0
"""So much of the pace may be used at once."""
KEPT_S = 60.0
"""A time that was given holds for so long; who comes later stands in line again."""


class Door:
    """Says who may come in now, and when the others."""

    def __init__(self, per_s: float) -> None:
        """per_s: registrations a second."""
        self._step_s = 1.0 / per_s
        self._next = float("-inf")
        """When the next one without a time of its own would come in."""
        self._times: dict[str, float] = {}
        """Of those who were sent away, in the order of the times."""

    def wait(self, client_id: str, now: float) -> float:
        """Seconds after which the client is to come again; 0: it is in."""
        given = self._times.get(client_id)
        if given is not None and given > now:
            return given - now
        if given is not None:
            del self._times[client_id]
            if now < given + KEPT_S:
                return 0.0
        return self._next_time(client_id, now)

    def _next_time(self, client_id: str, now: float) -> float:
        self._forget_before(now - KEPT_S)
        self._next = max(self._next, now - BURST_S) + self._step_s
        if self._next <= now:
            return 0.0
        self._times[client_id] = self._next
        return self._next - now

    def _forget_before(self, time: float) -> None:
        """Whoever did not come at its time leaves nothing behind."""
        while self._times and (first := next(iter(self._times.items())))[1] < time:
            del self._times[first[0]]
