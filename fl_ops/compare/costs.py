"""Expected times of cells, from rounds that were done. They decide the order of the work, and no number of a result."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from fl_ops.compare.cells import Cell, CellResult, rounds_of


class Costs:
    """Seconds of a round by method, times the processes that worked on it.

    Args:
        results: finished cells of earlier calls, possibly of another machine. Rounds of this call count first.
    """

    def __init__(self, results: Iterable[tuple[Cell, CellResult]] = ()) -> None:
        self._earlier: dict[str, list[float]] = {}
        self._now: dict[str, list[float]] = {}
        for cell, result in results:
            self._earlier.setdefault(cell.label, []).extend(row.seconds for row in result.rounds)

    def add(self, cell: Cell, seconds: float) -> None:
        """A round of a cell was done in this call. seconds: times the number of processes."""
        self._now.setdefault(cell.label, []).append(seconds)

    def of_round(self, label: str) -> float:
        """Expected seconds of a method's round; the mean of all methods for one without a round, 0 without any."""
        for known in (self._now, self._earlier):
            if known.get(label):
                return fmean(known[label])
        means = [fmean(values) for values in (self._now or self._earlier).values() if values]
        return fmean(means) if means else 0.0

    def of_cell(self, cell: Cell) -> float:
        """Expected seconds of a cell; its rounds if nothing is known, which puts long cells first."""
        return rounds_of(cell) * (self.of_round(cell.label) or 1.0)
