"""The policy as a gate: closed outside the site's hours, and while the policy file cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from zoneinfo import ZoneInfo

from fl_client.gates.base import GateReading
from fl_client.gates.window import WindowGate
from fl_client.policy.config import HourRules
from fl_client.policy.file import PolicyFile
from fl_client.settings.schedule import Schedule
from protos.fl.v1.coordinator_pb2 import UNAVAILABLE_REASON_OWNER

NAME = "policy"


class PolicyGate:
    """Reads the policy in force. Its closing ends a round in progress, unlike that of gates.windows."""

    name = NAME
    reason = UNAVAILABLE_REASON_OWNER
    debounced = False

    def __init__(self, file: PolicyFile, clock: Callable[[], float]) -> None:
        """clock: Unix seconds."""
        self._file, self._clock = file, clock
        self._hours: HourRules | None = None
        self._window: WindowGate | None = None

    def check(self) -> GateReading:
        """See Gate."""
        self._file.refresh()
        if self._file.now.problem:  # what is wrong with the file is the site's affair: the log has it
            return GateReading(open=False, detail="the site's policy file cannot be used")
        if (hours := self._file.now.policy.hours) != self._hours:
            self._hours, self._window = hours, self._window_of(hours)
        return GateReading(open=True) if self._window is None else self._window.check()

    def _window_of(self, hours: HourRules) -> WindowGate | None:
        if hours.windows is None:
            return None
        zone = ZoneInfo(hours.timezone) if hours.timezone else None
        return WindowGate(Schedule(hours.windows, zone), hours.timezone, self._clock)
