"""Tables that fit the width of the terminal: columns are left out by priority, and no cell is cut.

Rich would shorten every cell to some letters and dots instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fl_common.units import NOTHING

_NARROWEST = 24
"""Least width of a column whose text may take several lines."""
_GAP = 2
"""Blanks between columns."""

Cell = str | Text
T = TypeVar("T")


@dataclass
class FittedTable:
    """A table whose columns fit the width.

    columns: names; > before a name aligns the column to the right, for numbers.
    optional: columns that are left out if the width is too small, the first one first. Those without a value in any row
    go before all others. A narrow one stays where a wide one that is left out makes room for it.
    wraps: columns whose text may take several lines.
    """

    columns: Sequence[str]
    optional: Sequence[str] = ()
    wraps: Sequence[str] = ()
    names_missing: bool = True
    """Whether a line below the table names the columns that are left out."""
    rows: list[tuple[Cell, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Iterable[T], columns: Mapping[str, Callable[[T], Cell]], **options: Any) -> Self:
        """A table of these rows. columns: the cell of a row by the column's name; options: other fields."""
        table = cls(tuple(columns), **options)
        for row in rows:
            table.add_row(*(cell(row) for cell in columns.values()))
        return table

    def add_row(self, *cells: Cell) -> None:
        """Add a row with a cell for each column."""
        self.rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths()
        shown = self._that_fit(widths, options.max_width)
        yield self._table(shown, whole=_total(widths, shown) <= options.max_width, ruled=options.is_terminal)
        missing = [self._name(at) for at in range(len(self.columns)) if at not in shown and not self._empty(at)]
        if missing and self.names_missing:
            yield Text(f"wider terminals also show: {', '.join(missing)}", style="dim")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = _total(self._widths(), range(len(self.columns)))
        return Measurement(min(width, options.max_width), min(width, options.max_width))

    def _that_fit(self, widths: Sequence[int], width: int) -> list[int]:
        """The columns that are shown, in their order."""
        shown, left_out = list(range(len(self.columns))), list[int]()
        for index in self._by_priority():
            if _total(widths, shown) <= width:
                break
            shown.remove(index)
            left_out.append(index)
        for index in reversed(left_out):  # one wide column may have been in the way of narrow ones
            if not self._empty(index) and _total(widths, [*shown, index]) <= width:
                shown.append(index)
        return sorted(shown)

    def _by_priority(self) -> list[int]:
        """Columns that may be left out, in this order."""
        names = [self._name(index) for index in range(len(self.columns))]
        order = [names.index(name) for name in self.optional]
        return sorted(order, key=lambda index: not self._empty(index))

    def _widths(self) -> list[int]:
        """Width of each column in which its cells are whole; less for text that may take several lines."""
        widths = []
        for index in range(len(self.columns)):
            name = self._name(index)
            widest = max(cell_len(name), max((cell_len(str(row[index])) for row in self.rows), default=0))
            widths.append(min(widest, _NARROWEST) if name in self.wraps else widest)
        return widths

    def _table(self, shown: Sequence[int], *, whole: bool, ruled: bool) -> Table:
        """The table of these columns.

        whole: cells stay on one line, except in columns that wrap. ruled: with a line below the names; programs read
        lines of columns alone.
        """
        lines = box.SIMPLE_HEAD if ruled else None
        table = Table(box=lines, show_edge=False, pad_edge=False, padding=(0, _GAP - 1 if ruled else _GAP, 0, 0))
        for index in shown:
            table.add_column(
                self._name(index),
                justify="right" if self.columns[index].startswith(">") else "left",
                no_wrap=whole and self._name(index) not in self.wraps,
                overflow="fold",
            )
        for row in self.rows:
            table.add_row(*(row[index] for index in shown))
        return table

    def _name(self, index: int) -> str:
        return self.columns[index].removeprefix(">")

    def _empty(self, index: int) -> bool:
        return all(str(row[index]) in {"", NOTHING} for row in self.rows)


@dataclass(frozen=True)
class FirstThatFits:
    """Shows the first of several renderings that fits the width, and the last if none does."""

    renderings: Sequence[RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        any_width = options.update(max_width=1 << 20)
        for rendering in self.renderings[:-1]:
            if Measurement.get(console, any_width, rendering).maximum <= options.max_width:
                yield rendering
                return
        yield self.renderings[-1]


def _total(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[index] for index in shown) + _GAP * (len(shown) - 1)
