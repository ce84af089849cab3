"""The gate of the time windows: open in the owner's hours."""

from __future__ import annotations

from collections.abc import Callable

from fl_client.gates.base import GateReading
from fl_client.settings.schedule import Schedule
from protos.fl.v1.coordinator_pb2 import UNAVAILABLE_REASON_TIME_WINDOW

_RECHECK_S = 86_400.0
"""Seconds after which a schedule without a next change is checked again: a zone's rules may change."""


class WindowGate:
    """Open while a window of the schedule is open."""

    name = "window"
    reason = UNAVAILABLE_REASON_TIME_WINDOW
    debounced = False

    def __init__(self, schedule: Schedule, zone: str, clock: Callable[[], float]) -> None:
        """zone: its name, "" for the device's own. clock: Unix seconds."""
        self._schedule = schedule
        self._clock = clock
        windows = ", ".join(window.text for window in schedule.windows)
        self._closed = f"outside {windows}" + (f" ({zone})" if zone else "")
        self._latest: tuple[float, GateReading] | None = None

    def check(self) -> GateReading:
        """See Gate. The next change is computed once, and again when the clock was set."""
        now = self._clock()
        if self._latest is not None:
            since, reading = self._latest
            if since <= now < (reading.until or since + _RECHECK_S):
                return reading
        is_open = self._schedule.open_at(now)
        reading = GateReading(is_open, "" if is_open else self._closed, self._schedule.next_change(now))
        self._latest = now, reading
        return reading
