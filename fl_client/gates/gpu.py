"""The gate of the GPU: open while others use less than a share of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from fl_client.gates import sysfs
from fl_client.gates.base import Verdict
from protos.fl.v1.coordinator_pb2 import UNAVAILABLE_REASON_DEVICE_BUSY

READINGS, APART_S = 5, 0.2
"""Of a look: drivers say how it was in the last fraction of a second, and a window that is moved is no other work."""
QUIET_S = 2.0
"""So long after own work the whole GPU's load is the others'."""
_TEGRA = (
    "class/devfreq/*.gpu/device/load", "class/devfreq/*.g[amvp][0-9]*b/device/load",
    "devices/platform/gpu.0/load", "devices/gpu.0/load",
)  # fmt: skip
"""Where Jetsons say how busy their GPU is, the newer ones first."""


class Meter(Protocol):
    """Something that knows how busy a GPU is."""

    others_only: bool
    """True: own work is left out. False: it is the whole GPU's load."""

    def share(self) -> float:
        """From 0 to 1, of the last fraction of a second. Raises SensorError."""
        ...


class GpuGate:
    """Open while the mean of some readings is below the limit."""

    name = "gpu"
    reason = UNAVAILABLE_REASON_DEVICE_BUSY
    wavers = True

    def __init__(self, meter: Meter, below: float, idle_for: Callable[[], float]) -> None:
        """below: a share of 1. idle_for: seconds since this daemon computed, 0 while it does."""
        self._meter = meter
        self._below = below
        self._idle_for = idle_for
        self.pause: Callable[[float], None] = time.sleep

    def look(self) -> Verdict | None:
        """See Gate. A meter that cannot tell own work from others' says nothing while there is own work."""
        if self._own_work(QUIET_S):
            return None
        readings: list[float] = []
        for _ in range(READINGS):
            readings.append(self._meter.share())
            self.pause(APART_S)
        if self._own_work(QUIET_S + READINGS * APART_S):
            return None  # it began while we looked
        share = sum(readings) / len(readings)
        told = f"others use {share:.0%} of the GPU, the limit is {self._below:.0%}"
        return Verdict(share < self._below, told if share >= self._below else "")

    def _own_work(self, seconds: float) -> bool:
        """Whether what was measured in that time may be our own doing."""
        return not self._meter.others_only and self._idle_for() < seconds


class TegraMeter:
    """A Jetson's GPU, whose load Linux tells in thousandths."""

    others_only = False

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def found(cls, root: Path) -> TegraMeter | None:
        """The device's, under /sys as `root`; None where there is none."""
        paths = (path for pattern in _TEGRA for path in sorted(root.glob(pattern)))
        return next((cls(path) for path in paths if path.is_file()), None)

    def share(self) -> float:
        """See Meter."""
        return sysfs.number(self._path) / 1000
