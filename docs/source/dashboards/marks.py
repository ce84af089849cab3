"""A dashboard's annotations: vertical lines at events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from docs.source.dashboards import theme
from docs.source.dashboards.asking import Line, View


@dataclass(frozen=True)
class Mark:
    """An event with its start and end."""

    start: float
    end: float
    colour: str

    def draw(self, axes: Axes) -> None:
        """Draw a dashed line from the time axis, and a shade for the duration."""
        if self.end > self.start:
            axes.axvspan(self.start, self.end, color=self.colour, alpha=0.07, linewidth=0)
        for at in {self.start, self.end}:
            axes.axvline(at, color=self.colour, linewidth=theme.points(1), dashes=(3, 3), alpha=0.8)
            axes.plot(
                [at],
                [0],
                marker="^",
                color=self.colour,
                markersize=4,
                clip_on=False,
                transform=axes.get_xaxis_transform(),
            )


def marks_of(dashboard: Mapping[str, Any], view: View) -> list[Mark]:
    """Return the marks of all annotations that are shown by default."""
    shown = [annotation for annotation in dashboard["annotations"]["list"] if annotation["enable"]]
    return [mark for annotation in shown for mark in _marks(annotation, view)]


def _marks(annotation: Mapping[str, Any], view: View) -> Iterator[Mark]:
    colour = theme.colour(annotation["iconColor"])
    for line in view.lines({"expr": annotation["expr"], "legendFormat": ""}):
        for start, end in _regions(_times(annotation, line), float(annotation["step"].removesuffix("s"))):
            if end >= view.start and start <= view.end:
                yield Mark(max(start, view.start), min(end, view.end), colour)


def _times(annotation: Mapping[str, Any], line: Line) -> list[float]:
    if annotation["useValueForTime"]:
        return sorted({value / 1000 for _, value in line.points if not math.isnan(value)})
    return [at for at, value in line.points if value > 0]


def _regions(times: Sequence[float], step_s: float) -> list[tuple[float, float]]:
    """Merge times that are at most a step apart."""
    regions: list[tuple[float, float]] = []
    for at in times:
        if regions and at - regions[-1][1] <= step_s:
            regions[-1] = (regions[-1][0], at)
        else:
            regions.append((at, at))
    return regions
