"""Colours and text lengths of Grafana's dark theme. Lengths are pixels at a scale of 1."""

from __future__ import annotations

from functools import cache

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

PAGE, PANEL, EDGE = "#111217", "#181b1f", "#2a2d33"
INK, DIM, GRID = "#d2d3dc", "#8e909c", "#26292e"
LINK = "#6e9fff"
PALETTE = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#37872d", "#e0b400", "#c0d8ff")
"""The colours of series without their own colour, in this order."""
_NAMED = {
    "green": "#73bf69",
    "yellow": "#fade2a",
    "orange": "#ff9830",
    "red": "#f2495c",
    "blue": "#5794f2",
    "purple": "#b877d9",
    "text": "#9fa1ad",
    "transparent": "none",
}
DPI = 100
"""Pixels for each inch of the figure, at a scale of 1."""


def colour(name: str) -> str:
    """Return a colour by Grafana's name; other values unchanged."""
    return _NAMED.get(name, name)


def darker(hexadecimal: str) -> str:
    """Return a darker colour, readable behind white text."""
    return "#" + "".join(f"{round(0.62 * int(hexadecimal[at : at + 2], 16)):02x}" for at in (1, 3, 5))


def points(pixels: float) -> float:
    """Return a text length in matplotlib's unit."""
    return pixels * 72 / DPI


@cache
def width(text: str, pixels: float) -> float:
    """Return the width of a text."""
    if not text.strip():
        return 0.0
    return float(TextPath((0, 0), text, size=pixels, prop=FontProperties(family="DejaVu Sans")).get_extents().width)


def fitted(text: str, pixels: float, room: float) -> str:
    """Return the text, or its beginning and an ellipsis if it is too long."""
    if width(text, pixels) <= room:
        return text
    while text and width(f"{text}…", pixels) > room:
        text = text[:-1]
    return f"{text.rstrip()}…"
