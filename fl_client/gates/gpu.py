"""The gate of the GPU: open while other programs use less than a share of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from fl_client.gates import sysfs
from fl_client.gates.base import GateReading
from protos.fl.v1.coordinator_pb2 import UNAVAILABLE_REASON_DEVICE_BUSY

READINGS, APART_S = 5, 0.2
"""Readings of one check: a driver reports the last fraction of a second, in which a moved window looks like work."""
QUIET_S = 2.0
"""Seconds after the daemon's own work, from which on the whole load is that of other programs."""
_TEGRA = (
    "class/devfreq/*.gpu/device/load", "class/devfreq/*.g[amvp][0-9]*b/device/load",
    "devices/platform/gpu.0/load", "devices/gpu.0/load",
)  # fmt: skip
"""Files with the load of a Jetson's GPU, the newer models first."""


class LoadMeter(Protocol):
    """Measures the load of a GPU."""

    others_only: bool
    """True: without this daemon's work. False: the load of the whole GPU."""

    def share(self) -> float:
        """The load of the last fraction of a second, from 0 to 1. Raises SensorError."""
        ...


class GpuGate:
    """Open while the mean of several readings is below the limit."""

    name = "gpu"
    reason = UNAVAILABLE_REASON_DEVICE_BUSY
    debounced = True

    def __init__(self, meter: LoadMeter, below: float, idle_for: Callable[[], float]) -> None:
        """below: a share of 1. idle_for: seconds since this daemon computed, 0 while it does."""
        self._meter = meter
        self._below = below
        self._idle_for = idle_for
        self.pause: Callable[[float], None] = time.sleep

    def check(self) -> GateReading | None:
        """See Gate. A meter that includes the daemon's own work gives no information during that work."""
        if self._own_work(QUIET_S):
            return None
        readings: list[float] = []
        for _ in range(READINGS):
            readings.append(self._meter.share())
            self.pause(APART_S)
        if self._own_work(QUIET_S + READINGS * APART_S):
            return None  # own work began during the readings
        share = sum(readings) / len(readings)
        detail = f"others use {share:.0%} of the GPU, the limit is {self._below:.0%}"
        return GateReading(share < self._below, detail if share >= self._below else "")

    def _own_work(self, seconds: float) -> bool:
        """Whether the load of the last `seconds` may be the daemon's own."""
        return not self._meter.others_only and self._idle_for() < seconds


class TegraMeter:
    """A Jetson's GPU. Linux reports its load in thousandths."""

    others_only = False

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def found(cls, root: Path) -> TegraMeter | None:
        """The device's meter below `root`, which is /sys. None where there is none."""
        paths = (path for pattern in _TEGRA for path in sorted(root.glob(pattern)))
        return next((cls(path) for path in paths if path.is_file()), None)

    def share(self) -> float:
        """See LoadMeter."""
        return sysfs.read_number(self._path) / 1000
