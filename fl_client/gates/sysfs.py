"""Linux's word on the hardware: one value a file, under a root that is /sys unless settings or tests say otherwise."""

from __future__ import annotations

from pathlib import Path

from fl_client.gates.base import SensorError


def text(path: Path) -> str:
    """What a file says. Raises SensorError."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise SensorError(f"expected to read {path}, got {error.strerror or error}") from None


def number(path: Path) -> int:
    """A whole number. Raises SensorError."""
    value = text(path)
    try:
        return int(value)
    except ValueError:
        raise SensorError(f"expected a whole number in {path}, got {value[:40]!r}") from None


def word(path: Path) -> str:
    """What a file says, "" where it is not there or cannot be read."""
    try:
        return text(path)
    except SensorError:
        return ""
