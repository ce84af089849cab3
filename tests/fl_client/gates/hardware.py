"""A device's sensors as Linux shows them: a folder tree like /sys, with values that a test changes."""

from __future__ import annotations

from pathlib import Path


class Hardware:
    """The part of /sys that gates look at."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def supply(self, name: str, **files: str) -> None:
        """A power supply with these files: type="Mains", online="1"."""
        self._write(f"class/power_supply/{name}", files)

    def plug(self, plugged: bool) -> None:
        """A charger that is plugged in or not, and a battery."""
        self.supply("AC", type="Mains", online=str(int(plugged)))
        self.supply("BAT0", type="Battery", status="Charging" if plugged else "Discharging")

    def zone(self, number: int, kind: str, milli: str | int) -> Path:
        """A thermal zone of a type, in thousandths of a degree; returns its temperature's file."""
        folder = f"class/thermal/thermal_zone{number}"
        self._write(folder, {"type": kind, "temp": str(milli)})
        return self.root / folder / "temp"

    def jetson(self, load: int, place: str = "class/devfreq/17000000.gpu/device") -> None:
        """A Jetson's GPU with a load in thousandths."""
        self._write(place, {"load": str(load)})

    def _write(self, folder: str, files: dict[str, str]) -> None:
        (self.root / folder).mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            # In one step, as the kernel does it: a concurrent reader sees the earlier value.
            temporary = self.root / folder / f".{name}"
            temporary.write_text(f"{value}\n")
            temporary.rename(self.root / folder / name)
