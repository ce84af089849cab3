"""The gates of power supply, temperature and time windows, and the choice of the configured gates.

Each checks at the start that the device has its sensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zoneinfo import ZoneInfo

import torch

from fl_client.errors import ConfigError
from fl_client.gates.gate_set import Gate, GateReading, SensorError, read_number, read_optional, read_text
from fl_client.gates.gpu import GpuGate, NvmlMeter, TegraMeter
from fl_client.settings.config import GatesConfig
from fl_client.settings.schedule import Schedule
from protos.fl.v1.coordinator_pb2 import (
    UNAVAILABLE_REASON_POWER,
    UNAVAILABLE_REASON_TEMPERATURE,
    UNAVAILABLE_REASON_TIME_WINDOW,
)

_LINES = ("Mains", "USB", "Wireless")
"""Types of external supplies. Linux extends that of USB: USB_PD, USB_C."""
_CELLS = ("Battery", "UPS")


class PowerGate:
    """Open while an external supply is on. Without external supplies: while no battery is discharging."""

    name = "power"
    reason = UNAVAILABLE_REASON_POWER
    debounced = True

    def __init__(self, root: Path) -> None:
        """root: /sys. Raises ConfigError where Linux knows no supply."""
        self._folder = root / "class" / "power_supply"
        try:
            self.check()
        except SensorError as error:
            raise ConfigError(
                f"gates.on_mains: {error}; a device without a battery needs no on_mains: remove it"
            ) from None

    def check(self) -> GateReading:
        """See Gate. The folder is listed each time, because adapters and docks appear and disappear."""
        supplies = [path for path in sorted(self._folder.glob("*")) if read_optional(path / "scope") != "Device"]
        lines = [path for path in supplies if read_optional(path / "type").startswith(_LINES)]
        cells = [path for path in supplies if read_optional(path / "type") in _CELLS]
        if lines:
            # 2 means a programmable supply that is on.
            on_mains = any(read_number(path / "online") > 0 for path in lines)
        elif cells:
            on_mains = all(read_text(path / "status") != "Discharging" for path in cells)
        else:
            raise SensorError(f"expected a power supply in {self._folder}, found none")
        return GateReading(on_mains, "" if on_mains else "on battery")


_NO_THERMOMETERS = frozenset({"PMIC-Die"})
"""Zones with a constant value: a Jetson's power chip reports only its alarm limit, 100 degrees."""
_MILLI = 1000
_POSSIBLE = range(-60 * _MILLI, 250 * _MILLI)
"""Valid values, in thousandths of a degree. Drivers write -274000 or 0x7fffffff for a missing value."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Degrees Celsius."""

    below: float
    """The gate closes at this temperature."""
    margin: float
    """The gate opens again this far below."""


class TemperatureGate:
    """Compares the hottest zone with the limit. Not thread-safe: it remembers whether it is closed."""

    name = "temperature"
    reason = UNAVAILABLE_REASON_TEMPERATURE
    debounced = True

    def __init__(self, root: Path, zones: Sequence[str], limits: Limits) -> None:
        """root: /sys. zones: types of thermal zones, empty for all. Raises ConfigError for an unknown type."""
        self._folder = root / "class" / "thermal"
        self._zones = frozenset(zones)
        self._limits = limits
        self._hot = False
        types = {read_optional(path / "type") for path in self._paths()}
        if missing := sorted(self._zones - types):
            known = ", ".join(sorted(types)) or "none"
            raise ConfigError(
                f"gates.temperature_zones: expected types in {self._folder} ({known}), got {missing[0]!r}"
            )
        try:
            self.check()
        except SensorError as error:
            raise ConfigError(f"gates.temperature_below: {error}; remove it if the device has no thermometer") from None

    def check(self) -> GateReading:
        """See Gate."""
        degrees, zone = self._hottest()
        limit = self._limits.below - (self._limits.margin if self._hot else 0.0)
        self._hot = degrees >= limit
        detail = f"{zone} at {degrees:.0f} degrees Celsius, the limit is {self._limits.below:g}"
        return GateReading(not self._hot, detail if self._hot else "")

    def _hottest(self) -> tuple[float, str]:
        """The hottest zone. Zones that cannot be read are skipped, as their part may be powered down.

        Raises SensorError if no zone can be read.
        """
        readings, failed = [], f"expected a thermal zone in {self._folder}, found none"
        for path in self._paths():
            zone = read_optional(path / "type")
            if zone in _NO_THERMOMETERS or (self._zones and zone not in self._zones):
                continue
            try:
                value = read_number(path / "temp")
            except SensorError as error:
                failed = str(error)
                continue
            if value in _POSSIBLE:
                readings.append((value / _MILLI, zone))
            else:
                failed = f"expected a temperature in {path / 'temp'}, got {value}"
        if not readings:
            raise SensorError(failed)
        return max(readings)

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob("thermal_zone*"))


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


@dataclass(frozen=True, slots=True)
class HostState:
    """The inputs of the gates in addition to the device's sensors."""

    device: torch.device
    """The device that trains."""
    idle_for: Callable[[], float]
    """Seconds since this daemon computed, 0 while it does."""
    clock: Callable[[], float]
    """Unix seconds."""


def make_gates(config: GatesConfig, host: HostState) -> list[Gate]:
    """The gates, in the order in which their reasons are reported.

    Raises:
        ConfigError: a gate's sensor is not on this device.
    """
    gates: list[Gate] = []
    if config.temperature_below is not None:
        limits = Limits(config.temperature_below, config.temperature_margin)
        gates.append(TemperatureGate(config.sysfs, config.temperature_zones, limits))
    if config.on_mains:
        gates.append(PowerGate(config.sysfs))
    if config.gpu_below is not None:
        # A Jetson's driver has NVML too, but reports no load there.
        meter = TegraMeter.found(config.sysfs) or NvmlMeter(host.device)
        gates.append(GpuGate(meter, config.gpu_below, host.idle_for))
    if config.windows:
        zone = ZoneInfo(config.timezone) if config.timezone else None
        gates.append(WindowGate(Schedule(config.windows, zone), config.timezone, host.clock))
    return gates
