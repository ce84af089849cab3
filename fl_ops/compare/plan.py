"""Which cells a comparison still needs: decided anew from the finished ones, so that it may be stopped anywhere."""

from __future__ import annotations

from collections.abc import Callable, Collection

from fl_ops.compare.cells import Cell, CellResult
from fl_ops.compare.line_plan import LinePlan
from fl_ops.compare.table import Table
from fl_ops.errors import Misused


class Plan:
    """What a table asks for, with what is known of it.

    load: a cell's result if there is one; only: labels of the methods to look at, all if empty.
    """

    def __init__(self, table: Table, load: Callable[[Cell], CellResult | None], only: Collection[str] = ()) -> None:
        labels = [method.label for method in table.own.methods]
        if strange := [label for label in only if label not in labels]:
            raise Misused(f"--only: expected labels of the table, {', '.join(labels)}; got {', '.join(strange)}")
        self.table = table
        self._load = load
        self._known: dict[str, CellResult] = {}
        lines = [line for line in table.lines() if not only or line.method.label in only]
        self.lines = [LinePlan(table, line, self.find) for line in lines]

    def missing(self) -> list[Cell]:
        """The cells that can be run now, the most urgent first: tuning, then seed by seed."""
        seeds = self.table.own.seeds
        cells = [cell for line in self.lines for cell in line.missing()]
        return sorted(cells, key=lambda cell: seeds.index(cell.seed) if cell.stage == "final" else -1)

    def find(self, cell: Cell) -> CellResult | None:
        """What is known of a cell."""
        if cell.digest not in self._known and (found := self._load(cell)) is not None:
            self._known[cell.digest] = found
        return self._known.get(cell.digest)

    def done(self) -> int:
        """Cells that have a result."""
        return sum(len(line.done()) for line in self.lines)

    def left(self) -> tuple[int, int]:
        """(cells, rounds) that are not done, at most."""
        each = [line.left() for line in self.lines]
        return sum(cells for cells, _ in each), sum(rounds for _, rounds in each)
