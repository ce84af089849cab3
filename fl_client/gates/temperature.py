"""The gate of the thermometer: closed from a limit on, and until the device is some degrees below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_client.errors import ConfigError
from fl_client.gates import sysfs
from fl_client.gates.base import SensorError, Verdict
from protos.fl.v1.coordinator_pb2 import UNAVAILABLE_REASON_TEMPERATURE

_NO_THERMOMETERS = frozenset({"PMIC-Die"})
"""Zones that always say the same: a Jetson's power chip knows only its alarm, 100 degrees."""
_MILLI = 1000
_POSSIBLE = range(-60 * _MILLI, 250 * _MILLI)
"""What a device may measure, in thousandths of a degree; drivers write -274000 or 0x7fffffff for "nothing"."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Degrees Celsius."""

    below: float
    """It closes here."""
    margin: float
    """It opens again so far below."""


class TemperatureGate:
    """Looks at the hottest of its zones. Not for several threads: it remembers whether it is closed."""

    name = "temperature"
    reason = UNAVAILABLE_REASON_TEMPERATURE
    wavers = True

    def __init__(self, root: Path, zones: Sequence[str], limits: Limits) -> None:
        """root: /sys. zones: types of thermal zones, none for all. Raises ConfigError for one that is not there."""
        self._folder = root / "class" / "thermal"
        self._zones = frozenset(zones)
        self._limits = limits
        self._hot = False
        there = {sysfs.word(path / "type") for path in self._paths()}
        if missing := sorted(self._zones - there):
            known = ", ".join(sorted(there)) or "none"
            raise ConfigError(
                f"gates.temperature_zones: expected types of {self._folder}, which are {known}, got {missing[0]!r}"
            )
        try:
            self.look()
        except SensorError as error:
            raise ConfigError(
                f"gates.temperature_below: {error}; remove it where the device has no thermometer"
            ) from None

    def look(self) -> Verdict:
        """See Gate."""
        degrees, zone = self._hottest()
        limit = self._limits.below - (self._limits.margin if self._hot else 0.0)
        self._hot = degrees >= limit
        told = f"{zone} at {degrees:.0f} degrees Celsius, the limit is {self._limits.below:g}"
        return Verdict(not self._hot, told if self._hot else "")

    def _hottest(self) -> tuple[float, str]:
        """A zone of a part that is powered down cannot be read, and is passed over; all of them cannot be."""
        found, failed = [], f"expected a thermal zone in {self._folder}, found none"
        for path in self._paths():
            zone = sysfs.word(path / "type")
            if zone in _NO_THERMOMETERS or (self._zones and zone not in self._zones):
                continue
            try:
                value = sysfs.number(path / "temp")
            except SensorError as error:
                failed = str(error)
                continue
            if value in _POSSIBLE:
                found.append((value / _MILLI, zone))
            else:
                failed = f"expected a temperature in {path / 'temp'}, got {value}"
        if not found:
            raise SensorError(failed)
        return max(found)

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob("thermal_zone*"))
