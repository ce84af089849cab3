"""A sheet for panels, measured in pixels from the top left like Grafana's page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image

from docs.source.dashboards import theme

SCALE = 1.5
"""Dots of the picture for each pixel of the page: small text stays readable."""
COLOURS = 255
"""Colours in the picture's palette, which keeps the file small. k-means places them, so that rare colours stay."""


@dataclass(frozen=True)
class Box:
    """A rectangle on the sheet."""

    x: float
    y: float
    width: float
    height: float

    def inside(self, left: float, top: float, right: float, bottom: float) -> Box:
        """Return the box without these margins."""
        return Box(self.x + left, self.y + top, self.width - left - right, self.height - top - bottom)


class Sheet:
    """The whole picture."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._figure = Figure(figsize=(width / theme.DPI, height / theme.DPI), dpi=theme.DPI * SCALE)
        FigureCanvasAgg(self._figure)
        self._figure.set_facecolor(theme.PAGE)
        self._page = self.axes(Box(0, 0, width, height))
        self._page.set_xlim(0, width)
        self._page.set_ylim(height, 0)
        self._page.axis("off")

    def axes(self, box: Box) -> Axes:
        """Return axes that fill a box."""
        at = (
            box.x / self.width,
            1 - (box.y + box.height) / self.height,
            box.width / self.width,
            box.height / self.height,
        )
        axes = self._figure.add_axes(at)
        axes.patch.set_alpha(0)
        return axes

    def rounded(self, box: Box, fill: str, edge: str = "none", radius: float = 3) -> Self:
        """A filled box with round corners."""
        style = f"round,pad=0,rounding_size={radius}"
        patch = FancyBboxPatch(
            (box.x, box.y), box.width, box.height, boxstyle=style, facecolor=fill, edgecolor=edge, linewidth=0.7
        )
        self._page.add_patch(patch)
        return self

    def filled(self, box: Box, fill: str, alpha: float = 1.0) -> Self:
        """A filled box."""
        patch = Rectangle((box.x, box.y), box.width, box.height, facecolor=fill, linewidth=0, alpha=alpha)
        self._page.add_patch(patch)
        return self

    def text(self, x: float, y: float, words: str, size: float = 12, **looks: Any) -> Self:
        """Draw text with its middle line at y. looks: options of matplotlib's text."""
        looks = {"color": theme.INK, "va": "center_baseline", **looks}
        self._page.text(x, y, words, fontsize=theme.points(size), parse_math=False, **looks)
        return self

    def line(self, start: tuple[float, float], end: tuple[float, float], colour: str, thick: float = 1) -> Self:
        """A straight line."""
        self._page.plot(
            (start[0], end[0]), (start[1], end[1]), color=colour, linewidth=theme.points(thick), solid_capstyle="butt"
        )
        return self

    def save(self, path: Path) -> None:
        """Write it as PNG with a palette."""
        self._figure.savefig(path, facecolor=theme.PAGE)
        with Image.open(path) as picture:
            small = picture.convert("RGB").quantize(COLOURS, kmeans=3, dither=Image.Dither.NONE)
        small.save(path, optimize=True)
