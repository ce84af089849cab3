"""Reserved time slots for registrations. `now` is an argument, in seconds of a monotonic clock."""

from __future__ import annotations

from fl_common.rate_limits import TokenBucket

BURST_S = 2.0
"""Registrations of this many seconds may come at once."""
KEPT_S = 60.0
"""A reserved slot expires after this many seconds; the client then gets a new one."""


class RegistrationLimiter:
    """Limits the rate of registrations by reserved time slots.

    A client that comes when too many have come gets a slot, and is let in at that time. A fleet that fits into
    `BURST_S` is never delayed.
    """

    def __init__(self, per_s: float) -> None:
        """per_s: registrations a second."""
        self._bucket = TokenBucket(BURST_S * per_s, per_s)
        self._slots: dict[str, float] = {}
        """Reserved slots by client, in the order of time."""

    def wait(self, client_id: str, now: float) -> float:
        """Seconds until the client's slot; 0: it may register now."""
        slot = self._slots.get(client_id)
        if slot is not None and slot > now:
            return slot - now
        if slot is not None:
            del self._slots[client_id]
            if now < slot + KEPT_S:
                return 0.0
        return self._reserve(client_id, now)

    def _reserve(self, client_id: str, now: float) -> float:
        self._expire(now - KEPT_S)
        if wait := self._bucket.spend(1.0, now):
            self._slots[client_id] = now + wait
        return wait

    def _expire(self, before: float) -> None:
        """Drop slots that were not used in time."""
        while self._slots and (first := next(iter(self._slots.items())))[1] < before:
            del self._slots[first[0]]
