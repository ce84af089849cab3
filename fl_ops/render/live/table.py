"""The live table of `fl run watch`: the newest rounds that fit the terminal, the round's clients, totals, events."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from fl_common import units
from fl_ops.render.runs import health, waits
from fl_ops.render.runs.cohort import cohort_line
from fl_ops.render.runs.criterion import criterion_of, shown_metric
from fl_ops.render.runs.progress import SHOWN_EVENTS, RunProgress
from fl_ops.render.runs.rounds import rounds_table
from fl_ops.render.sparkline import sparkline
from fl_ops.render.states import run_state
from fl_ops.render.tables import metric_of, rounds_text

_HEADER_LINES = 2
_FEWEST_ROUNDS = 3
"""So many rounds are shown before there is a place for events."""


@dataclass(frozen=True)
class LiveTable:
    """A run's state, drawn for the size that the terminal has at that moment. Every line is one line."""

    progress: RunProgress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        progress, rows = self.progress, self.progress.rows()
        below = [
            line for line in (self._values(options.max_width), self._totals(), self._clients(), self._waits()) if line
        ]
        # One line stays free for the cursor.
        room = console.size.height - 1 - 1 - _HEADER_LINES - len(below)
        events = list(progress.events)[-min(SHOWN_EVENTS, max(0, room - _FEWEST_ROUNDS)) :] if room else []
        if room <= _FEWEST_ROUNDS:
            events = []
        yield _line(self._title(), "bold")
        shown = shown_metric(self.progress.run)
        yield rounds_table(rows[-max(1, room - len(events)) :], shown, names_missing=False)
        yield from (_line(text) for text in below)
        yield from (_line(text, "dim") for text in events)

    def _title(self) -> str:
        run = self.progress.run
        return f"{run.run_id}  {run_state(run)}  {rounds_text(run)} rounds  {run.eligible_clients} clients eligible"

    def _values(self, width: int) -> str:
        """The newest values of the run's metric as a line of bars."""
        metric, values = criterion_of(self.progress.run.spec.stop).metric, self.progress.values()
        if len(values) < 2:
            return ""
        shown = health.value(metric, values[-1])
        return f"{metric} {sparkline(values, width - len(metric) - len(shown) - 2)} {shown}"

    def _clients(self) -> str:
        return cohort_line(self.progress.run, self.progress.cohort)

    def _totals(self) -> str:
        run = self.progress.run
        left = self.progress.seconds_left()
        needs = "" if left is None else f"about {units.duration(round(left))} left, "
        best = f"best {metric_of(run, run.best)} in round {run.best.round}, " if run.HasField("best") else ""
        return f"{needs}{best}{units.size(run.bytes_down)} down, {units.size(run.bytes_up)} up in total"

    def _waits(self) -> str:
        if self.progress.lost:
            return self.progress.lost
        return waits.line(self.progress.run, time.monotonic() - self.progress.received)


def _line(text: str, style: str = "") -> Text:
    return Text(units.plain(text), style=style, no_wrap=True, overflow="ellipsis")
