"""The gate of the power supply: open while the device does not run on a battery."""

from __future__ import annotations

from pathlib import Path

from fl_client.errors import ConfigError
from fl_client.gates import sysfs
from fl_client.gates.base import GateReading, SensorError
from protos.fl.v1.coordinator_pb2 import UNAVAILABLE_REASON_POWER

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
        supplies = [path for path in sorted(self._folder.glob("*")) if sysfs.read_optional(path / "scope") != "Device"]
        lines = [path for path in supplies if sysfs.read_optional(path / "type").startswith(_LINES)]
        cells = [path for path in supplies if sysfs.read_optional(path / "type") in _CELLS]
        if lines:
            # 2 means a programmable supply that is on.
            on_mains = any(sysfs.read_number(path / "online") > 0 for path in lines)
        elif cells:
            on_mains = all(sysfs.read_text(path / "status") != "Discharging" for path in cells)
        else:
            raise SensorError(f"expected a power supply in {self._folder}, found none")
        return GateReading(on_mains, "" if on_mains else "on battery")
