"""Panels with a time axis: lines, stacked areas, and histograms over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from docs.source.dashboards import theme
from docs.source.dashboards.asking import Line, Look, View, look_of
from docs.source.dashboards.canvas import Box, Sheet
from docs.source.dashboards.units import on_axis, written

TEXT = 11.0
_BLUES = LinearSegmentedColormap.from_list("blues", ["#1b2a41", "#1f60c4", "#5794f2", "#c0d8ff"])


@dataclass(frozen=True)
class Drawn:
    """A series with its colour and style."""

    line: Line
    look: Look
    colour: str


def draw_lines(sheet: Sheet, box: Box, panel: Mapping[str, Any], view: View) -> Axes | None:
    """Draw a time series panel below its title; return its axes if it has data."""
    lines = [line for target in panel["targets"] for line in view.lines(target)]
    series = [_drawn(panel, line, place) for place, line in enumerate(lines)]
    if not series:
        _no_data(sheet, box)
        return None
    legend = _legend(sheet, box, series)
    axes = _time_axes(sheet, box, legend, view)
    top = _stacked(axes, series) if _is_stacked(panel) else _plain(axes, series)
    _y_axis(axes, panel, top)
    _limits(axes, panel)
    return axes


def _drawn(panel: Mapping[str, Any], line: Line, place: int) -> Drawn:
    look = look_of(panel, line.name)
    fixed = (look["color"] or {}).get("fixedColor")
    return Drawn(line, look, theme.colour(fixed) if fixed else theme.PALETTE[place % len(theme.PALETTE)])


def _is_stacked(panel: Mapping[str, Any]) -> bool:
    return bool(look_of(panel, "").custom("stacking", {}).get("mode") == "normal")


def _no_data(sheet: Sheet, box: Box) -> None:
    sheet.text(box.x + box.width / 2, box.y + box.height / 2, "No data", 13, color=theme.DIM, ha="center")


def _legend(sheet: Sheet, box: Box, series: Sequence[Drawn]) -> float:
    """Draw the names below the plot, as many in a line as fit; return their height."""
    rows, x = [[]], 0.0  # type: list[list[tuple[float, Drawn]]], float
    for curve in series:
        if curve.look.custom("lineWidth", 1) == 0 and curve.look.custom("fillBelowTo") is None:
            continue
        wide = 22 + theme.width(_called(curve), TEXT) + 14
        if x + wide > box.width - 20 and rows[-1]:
            rows.append([])
            x = 0.0
        rows[-1].append((x, curve))
        x += wide
    height = 17.0 * len(rows)
    for number, row in enumerate(rows):
        y = box.y + box.height - height + 17 * number + 5
        for at, curve in row:
            left = box.x + 14 + at
            band = curve.look.custom("fillBelowTo") is not None
            sheet.filled(Box(left, y - (4 if band else 1.5), 14, 8 if band else 3), curve.colour, 0.35 if band else 1.0)
            sheet.text(left + 20, y, _called(curve), TEXT, color=theme.INK)
    return height


def _called(each: Drawn) -> str:
    """A band is named by both its ends."""
    below = each.look.custom("fillBelowTo")
    return each.line.name if below is None else f"{below} … {each.line.name.rpartition(' ')[2]}"


def _time_axes(sheet: Sheet, box: Box, legend: float, view: View) -> Axes:
    axes = sheet.axes(box.inside(58, 6, 16, 26 + legend))
    axes.set_xlim(view.start, view.end)
    axes.spines[:].set_visible(False)
    axes.grid(color=theme.GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.DIM, length=0, labelsize=theme.points(TEXT), pad=4)
    step = next(seconds for seconds in (10, 15, 30, 60, 120, 300, 900, 3600) if (view.end - view.start) / seconds <= 5)
    first = math.ceil(view.start / step) * step
    axes.set_xticks(np.arange(first, view.end + 1, step))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{datetime.fromtimestamp(at, UTC):%H:%M:%S}"))
    return axes


def _plain(axes: Axes, series: Sequence[Drawn]) -> float:
    by_name = {curve.line.name: curve for curve in series}
    for curve in series:
        at, values = _xy(curve.line)
        width = curve.look.custom("lineWidth", 1)
        fill = curve.look.custom("fillOpacity", 0) / 100
        below = by_name.get(curve.look.custom("fillBelowTo"))
        if below is not None:
            axes.fill_between(at, _xy(below.line)[1], values, color=curve.colour, alpha=fill, linewidth=0)
        elif fill:
            axes.fill_between(at, 0, values, color=curve.colour, alpha=fill, linewidth=0)
        dash = curve.look.custom("lineStyle", {}).get("dash")
        style: Any = (0, tuple(dash)) if dash else "-"
        if width:
            axes.plot(at, values, color=curve.colour, linewidth=theme.points(width), linestyle=style)
    return max((_highest(curve.line) for curve in series), default=0.0)


def _stacked(axes: Axes, series: Sequence[Drawn]) -> float:
    base = np.zeros(len(series[0].line.points))
    for curve in series:
        at, values = _xy(curve.line)
        some = ~np.isnan(values)
        above = base + np.nan_to_num(values)
        fill = curve.look.custom("fillOpacity", 0) / 100
        axes.fill_between(at, base, above, where=some, color=curve.colour, alpha=fill, linewidth=0)
        edge = np.where(some & (np.nan_to_num(values) > 0), above, np.nan)
        axes.plot(at, edge, color=curve.colour, linewidth=theme.points(1))
        base = above
    return float(base.max())


def _xy(line: Line) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    at, values = zip(*line.points, strict=True)
    return np.array(at), np.array(values, dtype=float)


def _highest(line: Line) -> float:
    return max((value for _, value in line.points if math.isfinite(value)), default=0.0)


def _y_axis(axes: Axes, panel: Mapping[str, Any], top: float) -> None:
    look = look_of(panel, "")
    if look.custom("scaleDistribution", {}).get("type") == "log":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        low = look["min"] if look["min"] is not None else 0
        high = look["max"] if look["max"] is not None else (top * 1.05 or 1)
        axes.set_ylim(low, high)
        axes.set_yticks(_ticks(low, high, look))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: on_axis(value, look["unit"])))


def _ticks(low: float, high: float, look: Look) -> list[float]:
    """Return round numbers in the written unit: bytes in powers of 1024, time in seconds or minutes."""
    scale = 1.0
    if look["unit"] == "bytes":
        scale = 1024.0 ** int(math.log(max(high, 1.0), 1024.0))
    elif look["unit"] == "s" and high >= 60:
        scale = 60.0
    locator = MaxNLocator(5, integer=look["decimals"] == 0, steps=[1, 2, 2.5, 5, 10])
    return [scale * tick for tick in locator.tick_values(low / scale, high / scale) if low <= scale * tick <= high]


def _limits(axes: Axes, panel: Mapping[str, Any]) -> None:
    look = look_of(panel, "")
    if look.custom("thresholdsStyle", {}).get("mode", "off") == "off":
        return
    low, high = axes.get_ylim()
    for step in look["thresholds"]["steps"]:
        if step["value"] is not None and low <= step["value"] <= high:
            axes.axhline(step["value"], color=theme.colour(step["color"]), linewidth=theme.points(1.2), dashes=(6, 4))


def draw_buckets(sheet: Sheet, box: Box, panel: Mapping[str, Any], view: View) -> None:
    """Draw a histogram over time: brighter cells have more observations."""
    lines = sorted(view.lines(panel["targets"][0]), key=lambda line: float(line.labels["le"]))
    if not lines:
        _no_data(sheet, box)
        return
    sums = np.array([_xy(line)[1] for line in lines])
    counts = np.diff(sums, axis=0, prepend=0)
    axes = _time_axes(sheet, box, 17, view)
    axes.grid(visible=False)
    some = np.ma.masked_less(np.ma.masked_invalid(counts), 0.01)
    edges = np.array([at for at, _ in lines[0].points] + [view.end + view.step_s])
    most = max(1.0, float(some.max()) if some.count() else 1.0)
    axes.pcolormesh(edges, np.arange(len(lines) + 1), some, cmap=_BLUES, vmin=0, vmax=most, rasterized=True)
    axes.set_ylim(0, len(lines))
    axes.set_xlim(view.start, view.end)
    axes.set_yticks(np.arange(len(lines)) + 0.5, [line.name.removesuffix(".0") for line in lines])
    _scale(sheet, box, most)


def _scale(sheet: Sheet, box: Box, most: float) -> None:
    """Draw the scale of colours."""
    y, left = box.y + box.height - 12, box.x + 60
    for place in range(40):
        sheet.filled(Box(left + 3 * place, y - 4, 3.2, 8), _hex(place / 39))
    sheet.text(left - 8, y, "0", TEXT, ha="right", color=theme.DIM)
    sheet.text(left + 130, y, written(most, "none", 0), TEXT, color=theme.DIM)


def _hex(share: float) -> str:
    red, green, blue, _ = _BLUES(share)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
