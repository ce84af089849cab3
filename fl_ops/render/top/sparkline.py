"""Numbers as small bars in text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest `width` values, the lowest as the lowest bar. A value that is not finite is a blank."""
    shown = list(values)[-width:] if width > 0 else []
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    return "".join(_BARS[round((value - low) / step)] if math.isfinite(value) else " " for value in shown)


def bar(done: int, of: int, width: int) -> str:
    """A bar of `width` cells for done of so many."""
    filled = round(width * min(1.0, done / of)) if of else 0
    return "━" * filled + "─" * (width - filled)
