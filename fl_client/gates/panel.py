"""All gates of a device together: looked at in turn, slow to open, and patient with a sensor that fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from fl_client.gates.base import Gate, SensorError, Verdict
from protos.fl.v1.coordinator_pb2 import UnavailableReason

log = structlog.get_logger()

FAILURES = 3
"""Failed readings in a row from which on a gate counts as closed: the owner's condition cannot be seen to hold."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A gate that is closed, and what was found when it closed."""

    gate: str
    reason: UnavailableReason
    detail: str
    until: float | None
    """Unix seconds, where it is known."""


class Panel:
    """The gates and how each of them stands. Not for several threads at a time."""

    def __init__(
        self, gates: Sequence[Gate], open_after_s: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """open_after_s: so long must the condition of a gate that wavers hold before it is believed to be open."""
        self._lights = [_Light(gate, open_after_s, monotonic) for gate in gates]

    @property
    def gates(self) -> tuple[str, ...]:
        """The names of all gates."""
        return tuple(light.gate.name for light in self._lights)

    def look(self) -> tuple[Closed, ...]:
        """Look at every gate. Returns those that are closed; what their details say stays while they are."""
        for light in self._lights:
            light.look()
        return tuple(light.closed for light in self._lights if light.closed is not None)

    @property
    def changes_at(self) -> float | None:
        """Unix seconds at which a gate will change by itself, the next one; None if none is known to."""
        return min((light.until for light in self._lights if light.until is not None), default=None)


class _Light:
    """One gate as it stands."""

    def __init__(self, gate: Gate, open_after_s: float, monotonic: Callable[[], float]) -> None:
        self.gate = gate
        self.closed: Closed | None = None
        self.until: float | None = None
        self._open_after_s = open_after_s if gate.wavers else 0.0
        self._monotonic = monotonic
        self._good_since: float | None = None
        self._failures = 0

    def look(self) -> None:
        try:
            verdict = self.gate.look()
        except SensorError as error:
            verdict = self._failed(error)
        else:
            self._failures = 0
        if verdict is not None:
            self.until = verdict.until
            self._take(verdict)

    def _failed(self, error: SensorError) -> Verdict | None:
        """One reading may fail; a sensor that goes on failing closes its gate, and is told once."""
        self._failures, self._good_since = self._failures + 1, None
        if self._failures == FAILURES:
            log.warning("gate_sensor_failed", gate=self.gate.name, reason=str(error), counts_as="closed")
        return None if self._failures < FAILURES else Verdict(open=False, detail=f"cannot be read: {error}")

    def _take(self, verdict: Verdict) -> None:
        if not verdict.open:
            self._good_since = None
            if self.closed is None or self.closed.until != verdict.until:
                self.closed = Closed(self.gate.name, self.gate.reason, verdict.detail, verdict.until)
        elif self.closed is not None:
            now = self._monotonic()
            self._good_since = now if self._good_since is None else self._good_since
            if now - self._good_since >= self._open_after_s:
                self.closed, self._good_since = None, None
