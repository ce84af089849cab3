"""What a gate is: something that looks at the device or at the clock, and says whether it may train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protos.fl.v1.coordinator_pb2 import UnavailableReason


class SensorError(Exception):
    """What a gate looks at cannot be read now; the message says what was expected and what came."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one look found."""

    open: bool
    detail: str = ""
    """Why it is closed, in words."""
    until: float | None = None
    """Unix seconds at which this changes, where that is known beforehand."""


class Gate(Protocol):
    """One condition. It is looked at on a thread that trains nothing, and may take about a second."""

    name: str
    """As in metrics, settings and words: "window", "gpu", "power" or "temperature"."""
    reason: UnavailableReason
    """What the coordinator is told while it is closed."""
    wavers: bool
    """Whether it could open and close again and again, so that an opening is believed only when it has lasted."""

    def look(self) -> Verdict | None:
        """What holds now; None where nothing new can be said. Raises SensorError."""
        ...
