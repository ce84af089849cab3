"""Numbers as small bars in text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_LEAST_SPAN = 0.1
"""Of the bars, as a share of the highest value."""


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest `width` values, the highest as the highest bar. A value that is not finite is a blank.

    The lowest value is the lowest bar, unless all are close to each other: changes of less than a hundredth of the
    highest value are not seen.
    """
    shown = list(values)[-width:] if width > 0 else []
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return ""
    high = max(finite)
    span = max(high - min(finite), _LEAST_SPAN * abs(high)) or 1.0
    levels = {value: len(_BARS) - 1 - round((high - value) / span * (len(_BARS) - 1)) for value in finite}
    return "".join(_BARS[levels[value]] if math.isfinite(value) else " " for value in shown)


def bar(done: int, of: int, width: int) -> str:
    """A bar of `width` cells for done of so many."""
    filled = round(width * min(1.0, done / of)) if of else 0
    return "━" * filled + "─" * (width - filled)
