"""A curve in a table cell, as SVG. It is made of numbers alone, so it needs no escaping."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

_WIDTH, _HEIGHT, _MARGIN = 96, 22, 2
_LEAST_SPAN = 0.05
"""Of the height of a picture, as a share of the largest value."""


def spark(values: Sequence[float]) -> Markup:
    """The curve of some values, without text: the table beside it has the newest one. Empty for fewer than two."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return Markup("")
    low, high = min(finite), max(finite)
    step = (_WIDTH - 2 * _MARGIN) / (len(finite) - 1)
    # A curve that hardly changes is shown as flat, in the middle.
    span = max(high - low, _LEAST_SPAN * abs(high)) or 1.0
    low = (low + high - span) / 2
    inner = _HEIGHT - 2 * _MARGIN
    points = [
        (_MARGIN + index * step, _MARGIN + inner * (1 - (value - low) / span)) for index, value in enumerate(finite)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    last_x, last_y = points[-1]
    return Markup(  # noqa: S704 - numbers only
        f'<svg class="spark" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" aria-hidden="true">'
        f'<polyline points="{line}"/><circle cx="{last_x:.1f}" cy="{last_y:.1f}" r="1.8"/></svg>'
    )
