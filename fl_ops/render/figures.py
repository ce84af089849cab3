"""What all pictures and tables in files share: a figure without a window, the look of its panels, and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

INK, PALE, GRID = "#333333", "#b8b8b8", "#ebebeb"
COLOURS = ("#0b6e99", "#d1642e", "#4f8a3c", "#8a4f9e", "#b8860b", "#5a5a5a")
"""The first two differ for colour-blind readers and in grey."""
_FEW = 20


def new_figure(**options: Any) -> Any:
    """A figure of matplotlib that opens no window. options: of `matplotlib.figure.Figure`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here: few commands draw
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", **options)
    FigureCanvasAgg(figure)
    return figure


def plain_axes(axes: Any, labels: float = 8) -> None:
    """A pale grid behind the lines, and no frame above and on the right. labels: size of the numbers."""
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    axes.tick_params(colors=INK, length=3, labelsize=labels)


def marker_for(points: int) -> str:
    """Few points are drawn, too: one alone has no line."""
    return "o" if points <= _FEW else ""


def csv_text(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as CSV."""
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(heads)
    table.writerows(rows)
    return text.getvalue()
