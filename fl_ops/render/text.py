"""Texts, states and small pictures in the cells of tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from fl_common import units
from fl_web.facts.words import Fact, Part, worst_tone

STYLES = {"good": "green", "busy": "", "warn": "yellow", "bad": "bold red", "calm": ""}
"""The style of rich for each tone."""
_BARS = "▁▂▃▄▅▆▇█"
_LEAST_SPAN = 0.1
"""The least span of the bars, as a share of the highest value."""


def plain(text: str) -> Text:
    """Text from other machines: markup and control characters have no effect."""
    return Text(units.plain(text))


def told(parts: Iterable[Part]) -> str:
    """The parts of a fact as one text, with times in the local time zone."""
    return "".join(part if isinstance(part, str) else units.moment(part) for part in parts)


def state(words: str | Sequence[str], shown: str = "") -> Text:
    """A state in the colour of its most urgent word. shown: the text; empty: the word."""
    names = [words] if isinstance(words, str) else words
    return Text(units.plain(shown or ", ".join(names)), style=STYLES[worst_tone(names)])


def fact_grid(rows: Iterable[tuple[str, Text] | Fact]) -> Table:
    """Names and values, without those that have nothing to tell."""
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        text = value if isinstance(value, Text) else plain(told(value))
        if text.plain not in ("", units.NOTHING):
            grid.add_row(name, text)
    return grid


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
