"""Linux's files about the hardware: one value a file, below a root that is /sys outside of tests and containers."""

from __future__ import annotations

from pathlib import Path

from fl_client.gates.base import SensorError


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
