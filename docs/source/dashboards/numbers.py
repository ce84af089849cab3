"""Panels without a time axis: big numbers with their history behind them, and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from docs.source.dashboards import theme
from docs.source.dashboards.asking import Line, Look, View, by_threshold, look_of, mapped
from docs.source.dashboards.canvas import Box, Sheet
from docs.source.dashboards.units import written

ROW, TITLE = 30.0, 30.0
"""Heights of a table's row and of a panel's title."""


def draw_number(sheet: Sheet, box: Box, panel: Mapping[str, Any], view: View) -> None:
    """Draw one coloured number or word."""
    lines = [line for target in panel["targets"] for line in view.lines(target)]
    look = look_of(panel, "")
    value = lines[0].last if lines else None
    if value is None:
        _big(sheet, box, str(look["noValue"]), theme.DIM)
        return
    word = mapped(look, value)
    if word:
        text, colour = word
    else:
        text, colour = written(value, look["unit"], look["decimals"]), by_threshold(look, value)
    if panel["options"]["colorMode"] == "background":
        sheet.rounded(box.inside(1, -TITLE + 1, 1, -5), theme.darker(theme.colour(colour)))
        sheet.text(box.x + 12, box.y - TITLE + 16, panel["title"], 12.5, color="#ffffff")
        _big(sheet, box, text, "#ffffff")
        return
    if panel["options"]["graphMode"] == "area":
        _way_there(sheet, box, lines[0], theme.colour(colour))
    _big(sheet, box, text, theme.colour(colour))


def _big(sheet: Sheet, box: Box, text: str, colour: str) -> None:
    size = min(34.0, 34.0 * (box.width - 20) / max(1.0, theme.width(text, 34.0)))
    sheet.text(box.x + box.width / 2, box.y + box.height * 0.42, text, size, color=colour, ha="center")


def _way_there(sheet: Sheet, box: Box, line: Line, colour: str) -> None:
    at = np.array([when for when, _ in line.points])
    values = np.array([value for _, value in line.points], dtype=float)
    if np.count_nonzero(~np.isnan(values)) < 2:
        return
    axes = sheet.axes(Box(box.x + 1, box.y + box.height * 0.62, box.width - 2, box.height * 0.38 - 2))
    axes.axis("off")
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    room = (high - low) or abs(high) or 1.0
    axes.set_ylim(low - 0.15 * room, high + 0.1 * room)
    axes.set_xlim(at[0], at[-1])
    axes.fill_between(at, low - room, values, color=colour, alpha=0.18, linewidth=0)
    axes.plot(at, values, color=colour, linewidth=theme.points(1.2), alpha=0.9)


def draw_table(sheet: Sheet, box: Box, panel: Mapping[str, Any], view: View) -> None:
    """Return the rows of all queries, merged by their common labels, as in the panel's transformations."""
    names: dict[str, str] = panel["transformations"][1]["options"]["renameByName"]
    rows = _merged(panel, view)
    looks = {name: look_of(panel, title) for name, title in names.items()}
    widths = _widths(looks, box.width - 16)
    left = box.x + 8
    for (name, title), wide in zip(names.items(), widths, strict=True):
        right = name.startswith("Value")
        at = left + wide - 10 if right else left + 6
        sheet.text(at, box.y + 12, title, 11.5, color=theme.LINK, ha="right" if right else "left")
        for number, row in enumerate(rows[: int((box.height - 26) / ROW)]):
            cell = Box(left, box.y + 26 + ROW * number, wide, ROW)
            _cell(sheet, cell, looks[name], row.get(name))
        left += wide
    for number in range(len(rows) + 1):
        y = box.y + 26 + ROW * number
        sheet.line((box.x + 8, y), (box.x + box.width - 8, y), theme.EDGE, 1)


def _merged(panel: Mapping[str, Any], view: View) -> list[dict[str, str | float]]:
    merged: dict[str, dict[str, str | float]] = {}
    for target in panel["targets"]:
        for labels, value in view.rows(target):
            merged.setdefault(labels["run"], {}).update({**labels, f"Value #{target['refId']}": value})
    (by,) = panel["options"]["sortBy"]
    names = panel["transformations"][1]["options"]["renameByName"]
    field = next(name for name, title in names.items() if title == by["displayName"])
    return sorted(merged.values(), key=lambda row: float(row.get(field, 0)), reverse=by["desc"])


def _widths(looks: Mapping[str, Look], room: float) -> list[float]:
    """Return the widths: fixed ones unchanged, the others share the rest."""
    fixed = [float(look.custom("width", 0)) for look in looks.values()]
    each = (room - sum(fixed)) / fixed.count(0)
    return [wide or each for wide in fixed]


def _cell(sheet: Sheet, cell: Box, look: Look, value: str | float | None) -> None:
    y = cell.y + cell.height / 2
    if value is None or (isinstance(value, float) and math.isnan(value)):
        sheet.text(cell.x + cell.width - 10, y, str(look["noValue"]), 12, color=theme.DIM, ha="right")
    elif isinstance(value, str):
        word = mapped(look, value)
        colour = theme.colour(word[1]) if word else theme.LINK if look["links"] else theme.INK
        sheet.text(cell.x + 6, y, theme.fitted(value, 12, cell.width - 12), 12, color=colour)
    elif look.custom("cellOptions", {}).get("type") == "gauge":
        _gauge(sheet, cell, written(value, look["unit"], look["decimals"]), value / look["max"])
    else:
        sheet.text(cell.x + cell.width - 10, y, written(value, look["unit"], look["decimals"]), 12, ha="right")


def _gauge(sheet: Sheet, cell: Box, text: str, share: float) -> None:
    whole = cell.inside(12, 8, 52, 8)
    sheet.filled(whole, theme.EDGE)
    sheet.filled(Box(whole.x, whole.y, whole.width * min(1.0, share), whole.height), theme.colour("green"), 0.75)
    sheet.text(cell.x + cell.width - 10, cell.y + cell.height / 2, text, 12, ha="right")
