"""Gates: conditions of the device or of the time under which it may train, and the readings behind them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

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
    """The name in metrics, settings and logs: "window", "gpu", "power" or "temperature"."""
    reason: UnavailableReason
    """The reason for the coordinator while it is closed."""
    debounced: bool
    """Whether its condition may change often. Such a gate opens only when its condition has held for a while."""

    def check(self) -> GateReading | None:
        """The state now. None where the sensor gives no new information. Raises SensorError."""
        ...


def read_text(path: Path) -> str:
    """The content of a file. Raises SensorError."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise SensorError(f"expected to read {path}, got {error.strerror or error}") from None


def read_number(path: Path) -> int:
    """A whole number. Raises SensorError."""
    value = read_text(path)
    try:
        return int(value)
    except ValueError:
        raise SensorError(f"expected a whole number in {path}, got {value[:40]!r}") from None


def read_optional(path: Path) -> str:
    """The content of a file, or "" where it does not exist or cannot be read."""
    try:
        return read_text(path)
    except SensorError:
        return ""


log = structlog.get_logger()

FAILURES = 3
"""Failed readings in a row after which a gate counts as closed: its condition can no longer be checked."""


@dataclass(frozen=True, slots=True)
class ClosedGate:
    """A gate that is closed, with the reading that closed it."""

    gate: str
    reason: UnavailableReason
    detail: str
    until: float | None
    """Unix seconds, where it is known."""


class GateSet:
    """The gates and their states. Not thread-safe."""

    def __init__(
        self, gates: Sequence[Gate], open_after_s: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """open_after_s: seconds for which the condition of a debounced gate must hold before the gate opens."""
        self._states = [GateState(gate, open_after_s, monotonic) for gate in gates]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all gates."""
        return tuple(state.gate.name for state in self._states)

    def check(self) -> tuple[ClosedGate, ...]:
        """Check every gate. Returns the closed ones; their details stay the same while they are closed."""
        for state in self._states:
            state.check()
        return tuple(state.closed for state in self._states if state.closed is not None)

    @property
    def next_change(self) -> float | None:
        """Unix seconds of the next known change of a gate. None if no change is known."""
        return min((state.until for state in self._states if state.until is not None), default=None)


class GateState:
    """The state of one gate."""

    def __init__(self, gate: Gate, open_after_s: float, monotonic: Callable[[], float]) -> None:
        self.gate = gate
        self.closed: ClosedGate | None = None
        self.until: float | None = None
        self._open_after_s = open_after_s if gate.debounced else 0.0
        self._monotonic = monotonic
        self._good_since: float | None = None
        self._failures = 0

    def check(self) -> None:
        """Check the gate, and open or close it."""
        try:
            reading = self.gate.check()
        except SensorError as error:
            reading = self._failed(error)
        else:
            self._failures = 0
        if reading is not None:
            self.until = reading.until
            self._apply(reading)

    def _failed(self, error: SensorError) -> GateReading | None:
        """Close the gate after several failed readings in a row, with one line in the log."""
        self._failures, self._good_since = self._failures + 1, None
        if self._failures == FAILURES:
            log.warning("gate_sensor_failed", gate=self.gate.name, reason=str(error), counts_as="closed")
        return None if self._failures < FAILURES else GateReading(open=False, detail=f"cannot be read: {error}")

    def _apply(self, reading: GateReading) -> None:
        if not reading.open:
            self._good_since = None
            if self.closed is None or self.closed.until != reading.until:
                self.closed = ClosedGate(self.gate.name, self.gate.reason, reading.detail, reading.until)
        elif self.closed is not None:
            now = self._monotonic()
            self._good_since = now if self._good_since is None else self._good_since
            if now - self._good_since >= self._open_after_s:
                self.closed, self._good_since = None, None
