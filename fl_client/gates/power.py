"""The gate of the plug: open while the device does not live on a battery."""

from __future__ import annotations

from pathlib import Path

from fl_client.errors import ConfigError
from fl_client.gates import sysfs
from fl_client.gates.base import SensorError, Verdict
from protos.fl.v1.coordinator_pb2 import UNAVAILABLE_REASON_POWER

_LINES = ("Mains", "USB", "Wireless")
"""Types of supplies that are plugged in; those of USB go on: USB_PD, USB_C."""
_CELLS = ("Battery", "UPS")


class PowerGate:
    """Open while any line supplies power; where Linux knows of no line, while no battery is being drained."""

    name = "power"
    reason = UNAVAILABLE_REASON_POWER
    wavers = True

    def __init__(self, root: Path) -> None:
        """root: /sys. Raises ConfigError where Linux knows of no supply."""
        self._folder = root / "class" / "power_supply"
        try:
            self.look()
        except SensorError as error:
            raise ConfigError(
                f"gates.on_mains: {error}; a device without a battery needs no on_mains: remove it"
            ) from None

    def look(self) -> Verdict:
        """See Gate. The folder is read anew each time, for adapters and docks come and go."""
        supplies = [path for path in sorted(self._folder.glob("*")) if sysfs.word(path / "scope") != "Device"]
        lines = [path for path in supplies if sysfs.word(path / "type").startswith(_LINES)]
        cells = [path for path in supplies if sysfs.word(path / "type") in _CELLS]
        if lines:
            # 2 is a line that gives what it can be made to give.
            on_mains = any(sysfs.number(path / "online") > 0 for path in lines)
        elif cells:
            on_mains = all(sysfs.text(path / "status") != "Discharging" for path in cells)
        else:
            raise SensorError(f"expected a power supply in {self._folder}, found none")
        return Verdict(on_mains, "" if on_mains else "on battery")
