"""A whole dashboard as a picture: its head, its panels in the grid, and a note on the origin of the picture."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from docs.source.dashboards import theme
from docs.source.dashboards.asking import View
from docs.source.dashboards.canvas import Box, Sheet
from docs.source.dashboards.graphs import draw_buckets, draw_lines
from docs.source.dashboards.marks import marks_of
from docs.source.dashboards.numbers import TITLE, draw_number, draw_table

WIDTH, MARGIN, HEAD, FOOT = 1400.0, 16.0, 84.0, 44.0
ROW, GAP, COLUMNS = 30.0, 8.0, 24
"""Grafana's sizes: the height of a grid row and the gap between two rows."""


def draw(dashboard: Mapping[str, Any], view: View, path: Path, caption: str) -> None:
    """Write the picture."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    sheet = Sheet(WIDTH, HEAD + rows * (ROW + GAP) + FOOT)
    _head(sheet, dashboard, view)
    marks = marks_of(dashboard, view)
    for panel in dashboard["panels"]:
        box = _box(panel["gridPos"])
        if panel["type"] == "row":
            sheet.text(box.x + 4, box.y + box.height / 2 + 2, f"⌄  {view.filled(panel['title'])}", 15)
            continue
        sheet.rounded(box, theme.PANEL, theme.EDGE)
        sheet.text(box.x + 12, box.y + 16, theme.fitted(panel["title"], 12.5, box.width - 20), 12.5)
        inner = box.inside(0, TITLE, 0, 6)
        if panel["type"] == "timeseries":
            axes = draw_lines(sheet, inner, panel, view)
            if axes is not None:
                for mark in marks:
                    mark.draw(axes)
        else:
            _DRAW[panel["type"]](sheet, inner, panel, view)
    sheet.text(MARGIN + 4, sheet.height - FOOT / 2, caption, 12, color=theme.DIM)
    sheet.save(path)


_DRAW = {"stat": draw_number, "table": draw_table, "heatmap": draw_buckets}


def _box(grid: Mapping[str, int]) -> Box:
    column = (WIDTH - 2 * MARGIN + GAP) / COLUMNS
    return Box(
        MARGIN + grid["x"] * column,
        HEAD + grid["y"] * (ROW + GAP),
        grid["w"] * column - GAP,
        grid["h"] * (ROW + GAP) - GAP,
    )


def _head(sheet: Sheet, dashboard: Mapping[str, Any], view: View) -> None:
    """Draw title, time range, variables, annotations and links above the panels."""
    sheet.text(MARGIN + 4, 24, dashboard["title"], 18)
    begin, end = (datetime.fromtimestamp(at, UTC) for at in (view.start, view.end))
    times = f"{begin:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S} UTC"
    sheet.text(WIDTH - MARGIN - 4, 24, times, 12.5, ha="right", color=theme.DIM)
    x = MARGIN
    for variable in dashboard["templating"]["list"]:
        x = _chosen(sheet, x, variable["label"], _shown(variable, view))
    x += 10
    for annotation in dashboard["annotations"]["list"]:
        x = _switch(sheet, x, annotation)
    for link in dashboard["links"]:
        sheet.text(WIDTH - MARGIN - 4, 60, f"{link['title']}  →", 12.5, ha="right", color=theme.LINK)


def _shown(variable: Mapping[str, Any], view: View) -> str:
    value = view.variables[variable["name"]]
    return "All" if value == variable.get("allValue") else value


def _chosen(sheet: Sheet, x: float, label: str, value: str) -> float:
    first, second = theme.width(label, 12) + 18, theme.width(value, 12) + 22
    sheet.rounded(Box(x, 46, first, 28), "#22252b", theme.EDGE)
    sheet.rounded(Box(x + first, 46, second, 28), theme.PAGE, theme.EDGE)
    sheet.text(x + 9, 60, label, 12).text(x + first + 10, 60, value, 12)
    return x + first + second + GAP


def _switch(sheet: Sheet, x: float, annotation: Mapping[str, Any]) -> float:
    on = annotation["enable"]
    sheet.rounded(Box(x, 53, 26, 14), theme.colour(annotation["iconColor"]) if on else theme.EDGE, radius=7)
    sheet.rounded(Box(x + (14 if on else 2), 55, 10, 10), theme.INK, radius=5)
    sheet.text(x + 34, 60, annotation["name"], 12, color=theme.INK if on else theme.DIM)
    return x + 34 + theme.width(annotation["name"], 12) + 20
