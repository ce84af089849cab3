"""Numbers in Grafana's format, for the units of our dashboards."""

from __future__ import annotations

import math

_SECONDS = ((31557600, "years"), (604800, "weeks"), (86400, "days"), (3600, "hours"), (60, "mins"), (1, "s"))
_SMALL_SECONDS = ((1e-3, "ms"), (1e-6, "µs"))
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_BYTES_PER_SECOND = ("B/s", "kB/s", "MB/s", "GB/s")


def written(value: float, unit: str, decimals: int | None = None) -> str:
    """Return a value with its unit. decimals: their number; None chooses it by the size of the value."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞"
    number, suffix = _scaled(value, unit)
    return f"{_plain(number, decimals)}{suffix}"


def on_axis(value: float, unit: str) -> str:
    """Return a tick's value in the shortest form."""
    number, suffix = _scaled(value, unit)
    suffix = suffix.removesuffix("s") if number == 1 and len(suffix) > len(" ms") else suffix
    return f"{number:.4g}{suffix}" if abs(number) < 1e4 else f"{number:.0f}{suffix}"


def _scaled(value: float, unit: str) -> tuple[float, str]:
    if unit == "percentunit":
        return 100 * value, "%"
    if unit == "s":
        return _of_seconds(value)
    if unit in ("bytes", "Bps"):
        base, names = (1024.0, _BYTES) if unit == "bytes" else (1000.0, _BYTES_PER_SECOND)
        power = min(len(names) - 1, int(math.log(abs(value), base))) if abs(value) >= 1 else 0
        return value / base**power, f" {names[power]}"
    if unit == "none":
        return value, ""
    raise ValueError(f"expected a unit that is known here, got {unit!r}: add it")


def _of_seconds(value: float) -> tuple[float, str]:
    if value == 0:
        return 0.0, " s"
    for size, name in (*_SECONDS, *_SMALL_SECONDS):
        if abs(value) >= size:
            return value / size, f" {name}"
    return value * 1e6, " µs"


def _plain(number: float, decimals: int | None) -> str:
    if decimals is None:
        decimals = fitting_decimals(number)
    return f"{number:.{decimals}f}" if abs(number) < 1e6 or decimals else f"{number:.0f}"


def fitting_decimals(number: float) -> int:
    """Return the number of decimals: three digits in all with a fraction, as in Grafana; none for a whole number."""
    if number == 0 or float(number).is_integer():
        return 0
    return max(0, 2 - math.floor(math.log10(abs(number))))
