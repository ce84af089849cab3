"""A watched run until its end: a live table on a terminal, lines elsewhere, JSON lines for programs.

It gets events and draws. The watch itself, which connects again after a cut, is in `fl_ops.admin.watching`.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from fl_common import units
from fl_common.units import counted, measured, plain
from fl_ops.errors import Exit, Unreachable
from fl_ops.render import output
from fl_ops.render.rounds import cohort_line, rounds_table
from fl_ops.render.text import sparkline
from fl_web.facts.rounds import Round, evaluation, metric_of, on_clients, shown_metric
from fl_web.facts.run import rounds_text, time_left, value_of, waits
from fl_web.facts.words import event_words, run_state
from protos.fl.v1 import admin_pb2

SHOWN_ROUNDS = 11
"""Rounds that are kept: those of the pace, and the one before them."""
SHOWN_EVENTS = 4
KEPT_VALUES = 60
"""Rounds whose values of the metric are kept, for a sparkline."""
_ENDS = {
    admin_pb2.RUN_STATE_COMPLETED: Exit.OK,
    admin_pb2.RUN_STATE_STOPPED: Exit.RUN_STOPPED,
    admin_pb2.RUN_STATE_FAILED: Exit.RUN_FAILED,
}
_HEADER_LINES = 2
_MOST_EVENT_LINES = 6
_FEWEST_ROUNDS = 3
"""So many rounds are shown before there is a place for events."""


def exit_code(run: admin_pb2.RunStatus) -> Exit | None:
    """The exit code for a run that has ended; None before."""
    return _ENDS.get(run.state)


@dataclass(frozen=True)
class Lost:
    """Takes the place of an event: there is no connection to the coordinator; it is tried again."""

    why: str


@dataclass
class RunProgress:
    """A run, from the events so far. Keeps only the latest rounds and events: a run can last for weeks."""

    run: admin_pb2.RunStatus = field(default_factory=admin_pb2.RunStatus)
    received: float = 0.0
    """When the latest event arrived, by the monotonic clock."""
    lost: str = ""
    """What to show while there is no connection to the coordinator."""
    cohort: admin_pb2.ListCohortResponse | None = None
    """The clients of the round under way, as they were read last; a thread replaces it."""
    events: deque[str] = field(default_factory=lambda: deque(maxlen=SHOWN_EVENTS))
    _rounds: dict[int, Round] = field(default_factory=dict)
    _values: dict[int, float] = field(default_factory=dict)

    def add(self, event: admin_pb2.WatchRunResponse) -> None:
        """Add one event."""
        if event.event == "committed_before":  # its run has only the id
            self.add_round(event.round)
            return
        self.run, self.received, self.lost = event.run, time.monotonic(), ""
        for present, summary in (
            (event.run.HasField("latest"), event.run.latest),
            (event.HasField("round"), event.round),
        ):
            if present:
                self.add_round(summary)
        # The table has a row for each committed and evaluated round.
        if event.event not in {"committed", "evaluated"} and (line := event_line(event)) is not None:
            self.events.append(line)

    def add_round(self, summary: admin_pb2.RoundSummary) -> None:
        """Add a committed round, or what is new of it."""
        self._rounds[summary.round] = Round.of(summary)
        metric = metric_of(self.run.spec.stop)
        if metric in summary.metrics:
            self._values[summary.round] = summary.metrics[metric]
        for kept, most in ((self._rounds, SHOWN_ROUNDS), (self._values, KEPT_VALUES)):
            for old in sorted(kept)[:-most]:
                del kept[old]

    def values(self) -> list[float]:
        """The newest values of the run's metric, by round."""
        return [self._values[number] for number in sorted(self._values)]

    def rounds(self) -> list[Round]:
        """The latest committed rounds, by number."""
        return [self._rounds[number] for number in sorted(self._rounds)]

    def under_way(self) -> admin_pb2.RunStatus | None:
        """The run, if it has a round under way that is not among the committed ones."""
        return self.run if self.run.phase and self.run.rounds_done not in self._rounds else None


def event_line(event: admin_pb2.WatchRunResponse) -> str | None:
    """One event as a line, for logs and the live table; None for events that only change the table."""
    run, of, name = event.run, event.round, event.event.removesuffix("_before")
    if event.event in ("phase", "admitted"):
        return None
    if event.event == "snapshot" and exit_code(run) is None:
        return event_words(f"watching {run.run_id}: {counted(run.rounds_done, 'round')} done", run.reason)
    if event.event in ("snapshot", "state"):
        return event_words(run_state(run.state), event.detail or run.reason)
    if not event.HasField("round"):
        return event_words(event.event, event.detail)
    if event.event == "evaluated":
        texts = filter(None, (evaluation(of.metrics), *on_clients(of.metrics)))
        return event_words(f"round {of.round} evaluated", "; ".join(texts))
    clients = f"{of.accepted} of {counted(of.accepted + of.dropped, 'client')}, "
    moved = f", {units.size(of.bytes_down)} down, {units.size(of.bytes_up)} up"
    if of.cohort_hidden:
        clients = moved = ""
    line = f"round {of.round} {name}: {clients}{units.duration(of.seconds)}{moved}"
    missed = ["while there was no connection", evaluation(of.metrics)] if name != event.event else []
    line = f"{line}: {event.detail}" if event.detail else line
    return ", ".join(filter(None, (line, *missed)))


@dataclass(frozen=True)
class LiveTable:
    """A run's state, drawn for the size that the terminal has at that moment. What waits is never cut."""

    progress: RunProgress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        progress, rounds = self.progress, self.progress.rounds()
        lines = filter(None, (self._values(options.max_width), self._totals(), self._clients()))
        waits = Text(units.plain(self._waits()), style="yellow").wrap(console, options.max_width)
        below = [*map(_line, lines), *(line for line in waits if line.plain)]
        # One line stays free for the cursor.
        room = console.size.height - 1 - 1 - _HEADER_LINES - len(below)
        events: list[Text] = []
        for text in reversed(progress.events):
            whole = list(Text(units.plain(text), style="dim").wrap(console, options.max_width))
            if len(whole) + len(events) > min(_MOST_EVENT_LINES, room - _FEWEST_ROUNDS):
                break
            events = [*whole, *events]
        yield _line(self._title(), "bold")
        under_way = progress.under_way()
        rows = max(1, room - len(events)) - (under_way is not None)
        yield rounds_table(
            rounds[-rows:] if rows else [], shown_metric(progress.run), under_way=under_way, names_missing=False
        )
        yield from (*below, *events)

    def _title(self) -> str:
        run = self.progress.run
        eligible = "" if run.HasField("ended") else f"  {counted(run.eligible_clients, 'client')} eligible"
        return f"{run.run_id}  {run_state(run.state)}  {rounds_text(run)} rounds{eligible}"

    def _values(self, width: int) -> str:
        """The newest values of the run's metric as a line of bars."""
        metric, values = metric_of(self.progress.run.spec.stop), self.progress.values()
        if len(values) < 2:
            return ""
        shown = measured(values[-1], metric)
        return f"{metric} {sparkline(values, width - len(metric) - len(shown) - 2)} {shown}"

    def _clients(self) -> str:
        return cohort_line(self.progress.run, self.progress.cohort)

    def _totals(self) -> str:
        run = self.progress.run
        left = time_left(run, self.progress.rounds())
        needs = f"about {left} left, " if left else ""
        best = f"best {value_of(run, run.best.metrics)} in round {run.best.round}, " if run.HasField("best") else ""
        if run.cohorts_hidden:
            return f"{needs}{best}its clients are hidden"
        return f"{needs}{best}{units.size(run.bytes_down)} down, {units.size(run.bytes_up)} up in total"

    def _waits(self) -> str:
        if self.progress.lost:
            return self.progress.lost
        return waits(self.progress.run, time.monotonic() - self.progress.received)


def _line(text: str, style: str = "") -> Text:
    return Text(units.plain(text), style=style, no_wrap=True, overflow="ellipsis")


Shown = admin_pb2.WatchRunResponse | Lost
_LOST = "connection lost, waiting for the coordinator; Ctrl-C ends the watch, not the run"


def show_until_end(
    events: Iterable[Shown],
    as_json: bool,
    console: Console | None = None,
    earlier: Callable[[], admin_pb2.GetRunResponse] = admin_pb2.GetRunResponse,
    beside: Callable[[RunProgress], AbstractContextManager[object]] = nullcontext,
) -> Exit:
    """Show events as they arrive. Returns the exit code for the end of the run.

    earlier: gives the run and its newest rounds for the live table; it is called once, on a terminal only.
    beside: changes the progress of the live table between two events, for as long as its block lasts.

    Raises:
        Unreachable: the stream ended before the run.
    """
    console = console or Console()
    progress = RunProgress()
    live = Live(console=console, refresh_per_second=8) if console.is_terminal and not as_json else None
    if live is not None:
        before = earlier()
        progress.run = before.run
        for summary in before.rounds:
            progress.add_round(summary)
    with nullcontext() if live is None else live, nullcontext() if live is None else beside(progress):
        for event in events:
            if isinstance(event, Lost):
                progress.lost = _LOST
            else:
                progress.add(event)
            if live is not None:
                live.update(LiveTable(progress))  # its last state stays on the screen
            else:
                _print(event, console, as_json)
    code = exit_code(progress.run)
    if code is None:
        raise Unreachable(
            f"the coordinator ended the stream while the run was {run_state(progress.run.state)}: it may be "
            "restarting, and the run continues afterwards; use `fl run watch` again"
        )
    return code


def _print(event: Shown, console: Console, as_json: bool) -> None:
    """An event as a line, or as a line of JSON."""
    if not as_json:
        line = _LOST if isinstance(event, Lost) else event_line(event)
        if line is not None:
            # soft_wrap: a line of a log stays one line.
            console.print(plain(line), markup=False, highlight=False, soft_wrap=True)
            console.file.flush()
    elif isinstance(event, Lost):
        print(_LOST, file=sys.stderr, flush=True)  # stdout is for objects only
    else:
        output.show_line(event)
