"""The view of `fl top`: health, runs, what waits, clients; or the details of one run or client."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from fl_common import units
from fl_common.units import NOTHING
from fl_ops.render.fitted import FittedTable
from fl_ops.render.runs import waits
from fl_ops.render.sparkline import bar, sparkline
from fl_ops.render.states import client_state, state_name
from fl_ops.render.top.selection import HELP, Selection
from protos.fl.v1 import admin_pb2

POINTS = 16
"""Values of a sparkline."""
_BAR = 10
_STYLES = {"running": "green", "present": "green", "waiting": "yellow", "paused": "yellow", "suspect": "yellow",
           "failed": "bold red", "unspecified": "bold red", "banned": "red", "lost": "red"}  # fmt: skip


@dataclass(frozen=True)
class Federation:
    """A coordinator as it was at one time.

    active: the runs that have not ended, with what they wait for. details: of the chosen run or client.
    """

    server: str
    overview: admin_pb2.GetOverviewResponse
    clients: Sequence[admin_pb2.ClientStatus] = ()
    active: Mapping[str, admin_pb2.RunStatus] = field(default_factory=dict)
    details: RenderableType | None = None
    details_of: str = ""
    received: float = 0.0
    """By the monotonic clock."""

    def names(self, of: str) -> list[str]:
        """The names of a list, "runs" or "clients"."""
        return [run.run_id for run in self.overview.runs] if of == "runs" else [one.client_id for one in self.clients]


@dataclass(frozen=True)
class TopView:
    """What is on the screen. lost: why there is no connection now; empty: there is one."""

    federation: Federation
    selection: Selection = field(default_factory=Selection)
    lost: str = ""
    whole: bool = False
    """Whether all lines are shown: for output that is no terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = 1 << 16 if self.whole else (options.height or console.size.height)
        lines = [*self._head(), *self._body(console, options, height - len(self._head()) - 1)]
        if not self.whole:
            lines = [*lines[: height - 1], *[Text()] * (height - 1 - len(lines)), Text(HELP, style="dim")]
        for line in lines:
            line.truncate(options.max_width, overflow="ellipsis")
            yield from console.render(line, options.update(no_wrap=True, height=None))

    def _head(self) -> list[Text]:
        overview = self.federation.overview
        title = Text(f"{self.federation.server}  ", style="bold")
        title.append(self.lost or f"healthy, version {overview.version or 'unknown'}", "red" if self.lost else "green")
        return [title, _counts("runs", overview.runs_by_state, _RUN_ORDER), self._clients_line(), Text()]

    def _clients_line(self) -> Text:
        return _counts("clients", self.federation.overview.clients_by_state, _CLIENT_ORDER)

    def _body(self, console: Console, options: ConsoleOptions, room: int) -> list[Text]:
        found, chosen = self.federation, self.selection
        if chosen.open and chosen.name == found.details_of and found.details is not None:
            return _lines(console, options, found.details)
        waiting = self._waiting()
        room -= len(waiting) + (1 if waiting else 0) + 1  # and the blank line between the lists
        share = room // 2
        runs = min(len(found.overview.runs) + 2, max(share, room - len(found.clients) - 2))
        return [
            *_window(_lines(console, options, self._runs()), found.names("runs"), self._at("runs"), runs, self.whole),
            *waiting, *([Text()] if waiting else []), *([] if waiting else [Text()]),
            *_window(
                _lines(console, options, self._clients()), found.names("clients"), self._at("clients"), room - runs,
                self.whole,
            ),
        ]  # fmt: skip

    def _at(self, of: str) -> int:
        return self.selection.at(self.federation.names(of)) if self.selection.list == of else 0

    def _mark(self, of: str, name: str) -> str:
        chosen = not self.whole and self.selection.list == of and self.selection.name == name
        return "▸" if chosen else " "

    def _runs(self) -> RenderableType:
        table = FittedTable(
            (" ", "Run", "State", ">Rounds", "Progress", "Now", ">Best", "Metric", ">Left"),
            optional=("Progress", "Now", "Left", "Metric"),
            names_missing=False,
        )
        for run in self.federation.overview.runs:
            state = state_name(admin_pb2.RunState, run.state)
            now = f"{run.phase} {run.admitted}/{run.cohort_size}" if run.phase == "collecting" else run.phase
            table.add_row(
                self._mark("runs", run.run_id), Text(units.plain(run.run_id)), Text(state, _STYLES.get(state, "")),
                f"{run.rounds_done} of {run.rounds_planned or '?'}", bar(run.rounds_done, run.rounds_planned, _BAR),
                Text(units.plain(now)), _best(run), sparkline([point.value for point in run.points], POINTS),
                time_left(run, self.federation.overview),
            )  # fmt: skip
        return table if self.federation.overview.runs else Text("no runs yet: `fl run create config.toml` makes one")

    def _waiting(self) -> list[Text]:
        since = time.monotonic() - self.federation.received
        lines = {name: waits.line(run, since) for name, run in self.federation.active.items()}
        return [Text(units.plain(f"{name}: {line}"), style="yellow") for name, line in lines.items() if line]

    def _clients(self) -> RenderableType:
        table = FittedTable(
            (" ", "Client", "State", "Run", ">Counted", ">Refused", "Note"),
            optional=("Note", "Refused", "Counted", "Run"),
            names_missing=False,
        )
        for client in self.federation.clients:
            state = client_state(client)
            note = client.quarantine.reason or client.note
            table.add_row(
                self._mark("clients", client.client_id), Text(units.plain(client.client_id)),
                Text(units.plain(state), _STYLES.get(state.partition(",")[0], "")),
                Text(units.plain(client.run_id or NOTHING)), f"{client.updates_counted:,}",
                f"{client.updates_refused:,}", Text(units.plain(note)),
            )  # fmt: skip
        return table if self.federation.clients else Text("no clients yet: `fl-client --config client.toml` starts one")


def time_left(run: admin_pb2.RunOverview, overview: admin_pb2.GetOverviewResponse) -> str:
    """The expected time to the last planned round, by the mean time of the rounds so far; empty if nobody can know."""
    if run.HasField("ended") or not run.rounds_done or not run.rounds_planned or not run.HasField("latest_commit"):
        return ""
    each = (run.latest_commit.ToNanoseconds() - run.created.ToNanoseconds()) / run.rounds_done
    at_end = run.latest_commit.ToNanoseconds() + each * (run.rounds_planned - run.rounds_done)
    return units.duration(round(max(0.0, at_end - overview.now.ToNanoseconds()) / 1e9))


_RUN_ORDER = ("running", "waiting", "paused", "failed", "unspecified", "completed", "stopped")
_CLIENT_ORDER = ("present", "suspect", "lost", "draining", "quarantined", "banned")


def _counts(of: str, counts: Mapping[str, int], order: Sequence[str]) -> Text:
    """A line such as: clients  12 present, 1 lost."""
    line = Text(f"{of}  ", style="bold")
    parts = [(name, counts[name]) for name in order if counts.get(name)]
    for number, (name, count) in enumerate(parts):
        shown = "not loaded" if name == "unspecified" else name
        line.append(", " if number else "", "none")
        line.append(f"{count:,} {shown}", _STYLES.get(name, "none"))
    return line if parts else line.append("none", "none")


def _best(run: admin_pb2.RunOverview) -> str:
    if not run.HasField("best"):
        return NOTHING
    return units.percent(run.best) if units.is_accuracy(run.metric) else f"{run.best:.4g}"


def _lines(console: Console, options: ConsoleOptions, shown: RenderableType) -> list[Text]:
    """A rendering as lines with their styles."""
    found = []
    for segments in console.render_lines(shown, options.update(height=None), pad=False):
        line = Text()
        for segment in Segment.simplify(segments):
            line.append(segment.text, segment.style)
        line.rstrip()
        found.append(line)
    return found


def _window(lines: Sequence[Text], names: Sequence[str], at: int, room: int, whole: bool) -> list[Text]:
    """The part of a table around the chosen row that fits; its two lines of names stay."""
    if whole or len(lines) <= room or len(lines) < len(names):
        return list(lines[: None if whole else max(0, room)])
    head, rows = list(lines[: len(lines) - len(names)]), lines[len(lines) - len(names) :]
    space = max(1, room - len(head))
    first = max(0, min(at - space // 2, len(rows) - space))
    return [*head, *rows[first : first + space]][: max(0, room)]
