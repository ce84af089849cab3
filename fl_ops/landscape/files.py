"""The files of a landscape: every value as CSV, and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, BinaryIO

from fl_common.units import percent, value
from fl_ops.landscape.surface import Grid, Landscape
from fl_ops.render.figures import COLOURS, INK, PALE, csv_text, new_figure, plain_axes
from fl_ops.simulate.measures.section import EIGENVALUE, TRACE

_LEVELS = 18
_ACCURACY = "accuracy"


def as_csv(landscapes: Sequence[Landscape], grid: Grid) -> str:
    """A line for each point of each model."""
    names = sorted({name for landscape in landscapes for point in landscape.points for name in point.metrics})
    rows = (
        [landscape.label, *point.at, point.loss, *map(point.metrics.get, names)]
        for landscape in landscapes
        for point in landscape.points
    )
    return csv_text(["model", *("a", "b")[: 1 + grid.two], "loss", *names], rows)


def draw(landscapes: Sequence[Landscape], grid: Grid, title: str, file: BinaryIO) -> None:
    """Write the picture as PNG. All models are in one picture with the same scales."""
    figure = new_figure(dpi=120)
    (_surfaces if grid.two else _curves)(figure, landscapes, grid)
    figure.suptitle(title, color=INK, fontsize=10, x=0.01, ha="left")
    figure.savefig(file, format="png")


def legend(landscape: Landscape) -> str:
    """A model with what is known of its flatness."""
    of = landscape.sharpness
    return f"{landscape.label}: λmax {value(of[EIGENVALUE])}, trace {value(of[TRACE])}"


def _curves(figure: Any, landscapes: Sequence[Landscape], grid: Grid) -> None:
    with_accuracy = any(_ACCURACY in landscape.here.metrics for landscape in landscapes)
    figure.set_size_inches(9.6 if with_accuracy else 5.6, 4.0 + 0.22 * len(landscapes))
    panels = figure.subplots(1, 1 + with_accuracy, squeeze=False).flatten()
    lines = []
    for number, landscape in enumerate(landscapes):
        style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "linewidth": 1.7}
        if number >= len(COLOURS):
            style["linestyle"] = "--"
        at = [point.at[0] for point in landscape.points]
        lines += panels[0].plot(at, [_finite(point.loss) for point in landscape.points], **style)
        if with_accuracy:
            shares = [_finite(100 * point.metrics.get(_ACCURACY, math.nan)) for point in landscape.points]
            panels[1].plot(at, shares, **style)
    for panel, name in zip(panels, ("Loss", "Accuracy, %"), strict=False):
        plain_axes(panel)
        panel.set_title(name, loc="left", color=INK, fontsize=9.5)
        panel.set_xlabel("a, in norms of the model's filters", color=INK, fontsize=8.5)
        panel.axvline(0, color=PALE, linewidth=0.8, zorder=0)
        panel.set_xlim(-grid.radius, grid.radius)
    names = [legend(landscape) for landscape in landscapes]
    figure.legend(lines, names, loc="outside lower left", frameon=False, fontsize=8.5, labelcolor=INK)


def _surfaces(figure: Any, landscapes: Sequence[Landscape], grid: Grid) -> None:
    """Contours of the loss, a panel for each model, at levels that all panels share."""
    columns = min(3, len(landscapes))
    rows = math.ceil(len(landscapes) / columns)
    figure.set_size_inches(max(5.4, 3.9 * columns + 0.9), 3.9 * rows + 0.6)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    levels = _levels([point.loss for landscape in landscapes for point in landscape.points])
    drawn = None
    for panel, landscape in zip(panels, landscapes, strict=False):
        size = len(grid.axis)
        losses = [_finite(point.loss) for point in landscape.points]
        # Rows of a contour are b; the places run over a first.
        values = [[losses[a * size + b] for a in range(size)] for b in range(size)]
        drawn = panel.contourf(grid.axis, grid.axis, values, levels=levels, cmap="viridis_r", norm="log", extend="max")
        panel.contour(grid.axis, grid.axis, values, levels=levels, colors="white", linewidths=0.4, alpha=0.6)
        panel.plot(0, 0, marker="+", color="black", markersize=8)
        panel.set_title(_of_panel(landscape), loc="left", color=INK, fontsize=8.5)
        panel.set_aspect("equal")
        panel.tick_params(colors=INK, length=3, labelsize=8)
    for panel in panels[len(landscapes) :]:
        panel.set_visible(False)
    bar = figure.colorbar(drawn, ax=panels.tolist(), shrink=0.85)
    bar.set_label("Loss", color=INK, fontsize=8.5)
    bar.set_ticks(levels[::3], labels=distinct(levels[::3]))
    bar.ax.tick_params(which="both", right=False, labelsize=8, colors=INK)
    bar.minorticks_off()
    figure.supxlabel("a", color=INK, fontsize=9)
    figure.supylabel("b", color=INK, fontsize=9)


def _of_panel(landscape: Landscape) -> str:
    of, here = landscape.sharpness, landscape.here
    reached = f", accuracy {percent(here.metrics[_ACCURACY], 1)}" if _ACCURACY in here.metrics else ""
    first = f"{landscape.label}: loss {value(here.loss)}{reached}"
    return f"{first}\nλmax {value(of[EIGENVALUE])}, trace {value(of[TRACE])}"


def _levels(losses: Sequence[float]) -> list[float]:
    """Levels with equal ratios from the lowest loss to nine tenths of the points."""
    finite = sorted(loss for loss in losses if math.isfinite(loss) and loss > 0)
    low = finite[0] if finite else 1e-3
    high = max(finite[int(0.9 * (len(finite) - 1))] if finite else 1.0, 1.01 * low)
    return [low * (high / low) ** (number / (_LEVELS - 1)) for number in range(_LEVELS)]


def distinct(levels: Sequence[float]) -> list[str]:
    """The levels with three digits, or with as many as tell them apart."""
    written: list[str] = []
    for digits in range(3, 18):
        written = [f"{level:.{digits}g}" for level in levels]
        if len(set(written)) == len(set(levels)):
            break
    return written


def _finite(number: float) -> float:
    return number if math.isfinite(number) else math.nan
