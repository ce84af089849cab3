"""Lines about a comparison in progress: cells and rounds done, the time left, and the best method so far."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from statistics import fmean, median

from fl_common.units import counted, duration, percent
from fl_ops.compare.cells import Cell, CellResult, RoundRow, in_percent, rounds_of
from fl_ops.compare.plan import Plan


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


class Sharing:
    """Whether runs that share a device are faster side by side than one after the other.

    The first run begins alone. Its rounds alone and beside the others tell.
    """

    MEASURED = 5
    """Rounds alone, and as many beside the others."""
    UNCOUNTED = 2
    """First rounds of a run, which choose a strategy and record steps."""
    LEAST_GAIN = 1.1
    """Rounds of all runs in the time of one round alone."""

    def __init__(self, processes: int, write: Callable[[str], None]) -> None:
        """processes: runs at a time; write: gets the line for the user."""
        self._processes, self._write = processes, write
        self._first, self._ended = "", False
        self._rounds: Counter[str] = Counter()
        self._alone: list[float] = []
        self._beside: list[float] = []

    @property
    def begins_others(self) -> bool:
        """Whether the other runs may begin."""
        return self._ended or len(self._alone) == self.MEASURED

    def add(self, digest: str, seconds: float, running: Collection[str]) -> None:
        """A round of a run was done. running: the digests of all that are under way."""
        self._first = self._first or digest
        self._rounds[digest] += 1
        if digest != self._first or any(self._rounds[one] <= self.UNCOUNTED for one in running):
            return
        if not self.begins_others:
            self._alone.append(seconds)
        elif len(running) == self._processes and len(self._beside) < self.MEASURED:
            self._beside.append(seconds)
            if len(self._beside) == self.MEASURED:
                self._tell()

    def ended(self, digest: str) -> None:
        """A run has ended. If it was the first one, nothing more is known."""
        self._ended = self._ended or digest == self._first

    def _tell(self) -> None:
        longer = median(self._beside) / median(self._alone)
        if self._processes / longer < self.LEAST_GAIN:
            self._write(
                f"--processes {self._processes}: a round takes {longer:.1f} times as long as alone, so the runs only "
                "get in each other's way; fewer processes are as fast"
            )


_EVERY_S = 60.0
"""Seconds between two lines about running cells."""


@dataclass(frozen=True)
class _Running:
    """A cell in a worker. accuracy: the latest; None before the first evaluation."""

    cell: Cell
    rounds: int
    accuracy: float | None
    """The value of the metric that the table compares."""
    shown: str
    """The same as text; empty before the first evaluation."""

    def __str__(self) -> str:
        cell, reached = self.cell, f", {self.shown}" if self.shown else ""
        return f"{_name(cell)}: {self.rounds} of {counted(rounds_of(cell), 'round')}{reached}"


def _name(cell: Cell) -> str:
    return f"{cell.label}, {cell.stage}, seed {cell.seed}, rate {cell.settings['run']['local']['learning_rate']:g}"


class Progress:
    """A `Watch` that writes a line for each finished cell, and one a minute about those that run."""

    def __init__(self, plan: Plan, costs: Costs, processes: int, write: Callable[[str], None]) -> None:
        self._plan = plan
        self._costs = costs
        self._processes = processes
        self._write = write
        self._done = plan.done()
        self._best: tuple[float | None, str] = (None, "")
        self._criterion = plan.table.spec.report.criterion
        self._running: dict[str, _Running] = {}
        self._wrote = time.monotonic()
        self.finished = 0
        """Number of cells that were finished in this call."""

    def round_done(self, cell: Cell, row: RoundRow) -> None:
        """See Watch."""
        before, row = self._running.get(cell.digest), row.by(self._criterion.metric)
        accuracy = row.accuracy if row.accuracy is not None or before is None else before.accuracy
        shown = "" if accuracy is None else self._text(accuracy)
        self._running[cell.digest] = _Running(cell, row.round + 1, accuracy, shown)
        if time.monotonic() - self._wrote >= _EVERY_S:
            self._line(f"running: {self.running()}")

    def cell_done(self, cell: Cell, result: CellResult) -> None:
        """See Watch."""
        self._running.pop(cell.digest, None)
        self._done += 1  # plan.done() may already count a cell whose worker has written its file and not reported it
        self.finished += 1
        criterion = self._criterion
        values = [value for value in result.by(criterion.metric).accuracies if math.isfinite(value)]
        best = (min if criterion.lower_is_better else max)(values, default=None)
        if cell.stage == "final" and criterion.better(best, self._best[0]):
            self._best = (best, cell.label)
        reached = "not evaluated" if best is None else self._text(best)
        ended = f"diverged in round {result.diverged}" if result.diverged is not None else reached
        leader = "" if self._best[0] is None else f"; best on the test set {self._best[1]} {self._text(self._best[0])}"
        self._line(f"{_name(cell)}: {ended} in {duration(result.seconds)}{leader}")

    def _text(self, value: float) -> str:
        return percent(value, 1) if in_percent(self._criterion.metric) else f"{value:.4g}"

    def left(self) -> str:
        """The expected rest: cells, rounds and time."""
        cells, rounds = self._plan.left()
        needs = self.time_left()
        return f"about {counted(cells, 'cell')} with {counted(rounds, 'round')}" + (
            f", {needs} with --processes {self._processes}" if needs else ""
        )

    def time_left(self) -> str:
        """The expected time of the rest; empty if no round tells."""
        rest_of_methods = [(rounds, label) for (label, _), (_, rounds) in self._plan.left_of_each().items()]
        rest_of_methods += [(-running.rounds, running.cell.label) for running in self._running.values()]
        rest = sum(rounds * self._costs.of_round(label) for rounds, label in rest_of_methods)
        return duration(rest / self._processes) if rest > 0 else ""

    def running(self) -> str:
        """How far each running cell has come; empty before the first round."""
        return "; ".join(map(str, self._running.values()))

    def _line(self, text: str) -> None:
        self._wrote = time.monotonic()
        total = self._plan.done() + self._plan.left()[0]
        needs = self.time_left()
        time_left = f", {needs} left" if needs else ""
        self._write(f"{time.strftime('%H:%M:%S')}  {self._done} of about {counted(total, 'cell')}{time_left}  {text}")
