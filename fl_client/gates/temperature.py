"""The gate of the temperature: it closes at a limit, and opens again some degrees below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_client.errors import ConfigError
from fl_client.gates import sysfs
from fl_client.gates.base import GateReading, SensorError
from protos.fl.v1.coordinator_pb2 import UNAVAILABLE_REASON_TEMPERATURE

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
        found = {sysfs.read_optional(path / "type") for path in self._paths()}
        if missing := sorted(self._zones - found):
            known = ", ".join(sorted(found)) or "none"
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
            zone = sysfs.read_optional(path / "type")
            if zone in _NO_THERMOMETERS or (self._zones and zone not in self._zones):
                continue
            try:
                value = sysfs.read_number(path / "temp")
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
