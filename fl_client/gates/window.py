"""The gate of the clock: open in the owner's hours."""

from __future__ import annotations

from collections.abc import Callable

from fl_client.gates.base import Verdict
from fl_client.gates.schedule import Schedule
from protos.fl.v1.coordinator_pb2 import UNAVAILABLE_REASON_TIME_WINDOW


class WindowGate:
    """Open while a window of the schedule is."""

    name = "window"
    reason = UNAVAILABLE_REASON_TIME_WINDOW
    wavers = False

    def __init__(self, schedule: Schedule, zone: str, clock: Callable[[], float]) -> None:
        """zone: its name, "" for the device's own. clock: Unix seconds."""
        self._schedule = schedule
        self._clock = clock
        windows = ", ".join(window.text for window in schedule.windows)
        self._closed = f"outside {windows}" + (f" ({zone})" if zone else "")
        self._found: tuple[float, Verdict] | None = None

    def look(self) -> Verdict:
        """See Gate. When it changes is looked for once, and again where the clock was set."""
        now = self._clock()
        if self._found is not None:
            since, verdict = self._found
            if since <= now < (verdict.until or since + _LOOK_AGAIN):
                return verdict
        is_open = self._schedule.open_at(now)
        verdict = Verdict(is_open, "" if is_open else self._closed, self._schedule.next_change(now))
        self._found = now, verdict
        return verdict


_LOOK_AGAIN = 86_400.0
"""Seconds after which a schedule that never changes is looked at all the same: the rules of a zone may."""
