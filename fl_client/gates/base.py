"""The interface of a gate: a condition of the device or of the time under which it may train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protos.fl.v1.coordinator_pb2 import UnavailableReason


class SensorError(Exception):
    """A sensor cannot be read now. The message names what was expected and what was found."""


@dataclass(frozen=True, slots=True)
class GateReading:
    """The result of one check."""

    open: bool
    detail: str = ""
    """Why it is closed."""
    until: float | None = None
    """Unix seconds of the next change, where it is known."""


class Gate(Protocol):
    """One condition. It is checked on a thread that does not train, and may take about a second."""

    name: str
    """As in metrics, settings and logs: "window", "gpu", "power" or "temperature"."""
    reason: UnavailableReason
    """The reason for the coordinator while it is closed."""
    debounced: bool
    """Whether its condition may change often. Such a gate opens only when its condition has held for a while."""

    def check(self) -> GateReading | None:
        """The state now. None where the sensor gives no new information. Raises SensorError."""
        ...
