"""The whole federation on one terminal: what is drawn, and which key does what.

It gets messages and gives lines; the calls and the terminal itself are elsewhere. Every line fits the width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from fl_common import units
from fl_common.units import measured
from fl_ops.render.fitted import Cell, FittedTable
from fl_ops.render.tables import CLIENT_COLUMNS
from fl_ops.render.text import STYLES, bar, plain, sparkline, state
from fl_web.facts import client as client_facts
from fl_web.facts.federation import health, problems
from fl_web.facts.run import delivered, rounds_text, time_left, waits
from fl_web.facts.words import CLIENT_MARKS, CLIENT_STATES, NOT_LOADED, RUN_STATES, mark_words, run_state, tone
from protos.fl.v1 import admin_pb2

List = Literal["runs", "clients"]
HELP = "↑↓ move  tab other list  enter details  esc back  q leave"


@dataclass(frozen=True)
class Selection:
    """The chosen line, by name: it stays chosen when the list changes."""

    list: List = "runs"
    name: str = ""
    open: bool = False
    left: bool = False
    """Whether the view was left."""

    def at(self, names: Sequence[str]) -> int:
        """The index of the chosen line; the first one if it is not there any more."""
        return names.index(self.name) if self.name in names else 0

    def fitting(self, names: Sequence[str]) -> Selection:
        """The same with a line that is there."""
        return replace(self, name=names[self.at(names)] if names else "", open=self.open and bool(names))

    def after(self, key: str, names: Sequence[str], page: int) -> Selection:
        """The selection after a key. names: of the walked list; page: lines that a page key moves."""
        at = self.at(names)
        moves = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -len(names), "end": len(names)}
        if key == "q":
            return replace(self, left=True)
        if key in moves and names:
            return replace(self, name=names[max(0, min(len(names) - 1, at + moves[key]))])
        if key == "tab":
            return Selection("clients" if self.list == "runs" else "runs")
        if key == "enter" and names:
            return replace(self, name=names[at], open=True)
        return replace(self, open=False) if key == "esc" else self


_KEYS = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down",
    "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home", "\x1b[F": "end",
    "\t": "tab", "\r": "enter", "\n": "enter", "\x1b": "esc", "\x7f": "esc", "q": "q", "Q": "q",
}  # fmt: skip


def keys(typed: str) -> list[str]:
    """The names of the keys in what a terminal sent; unknown ones are left out."""
    names, rest = [], typed
    while rest:
        known = max((code for code in _KEYS if rest.startswith(code)), key=len, default="")
        if known == "\x1b" and len(rest) > 1 and rest[1] in "[O":
            known, name = rest, ""  # an escape sequence of another key
        else:
            name = _KEYS.get(known, "")
        names += [name] if name else []
        rest = rest[max(1, len(known)) :]
    return names


POINTS = 16
"""Values of a sparkline."""
_BAR = 10
_CLIENT_COLUMNS = (
    "Client", "State", "Run", ">Counted", ">Refused", ">Failed", ">Work", ">Transfer", ">Came last", "Note",
)  # fmt: skip
_COUNTED = {"attention": "need attention"}
"""The words after a number of clients, where they are not the word of the mark."""
_MOST_WAITING = 10
"""Lines on what waits or needs attention."""


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
    """When it was read, by the monotonic clock."""

    def names(self, of: str) -> list[str]:
        """The names of a list, "runs" or "clients"."""
        if of == "runs":
            return [run.run_id for run in self.overview.runs]
        return [client.client_id for client in self.clients]


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
        for line in lines:  # those of tables fit, and what waits is wrapped
            line.truncate(options.max_width, overflow="ellipsis")
            yield from console.render(line, options.update(no_wrap=True, height=None))

    def _head(self) -> list[Text]:
        overview = self.federation.overview
        title = Text(f"{self.federation.server}  ", style="bold")
        tone_now, words = ("bad", self.lost) if self.lost else health(problems(overview))
        title.append(words if self.lost else f"{words}, version {overview.version or 'unknown'}", STYLES[tone_now])
        runs = {NOT_LOADED if name == "unspecified" else name: n for name, n in overview.runs_by_state.items()}
        by_state = {_COUNTED.get(name, name): count for name, count in overview.clients_by_state.items()}
        clients = _counts("clients", by_state, (*CLIENT_STATES, *(_COUNTED.get(mark, mark) for mark in CLIENT_MARKS)))
        return [title, _counts("runs", runs, (*RUN_STATES, NOT_LOADED)), clients, Text()]

    def _body(self, console: Console, options: ConsoleOptions, room: int) -> list[Text]:
        federation, chosen = self.federation, self.selection
        if chosen.open and chosen.name == federation.details_of and federation.details is not None:
            return _lines(console, options, federation.details)
        texts = [list(text.wrap(console, options.max_width)) for text in self._waiting()]
        waiting = _shared(texts, 1 << 16 if self.whole else max(1, room // 3))
        room -= len(waiting) + (1 if waiting else 0) + 1  # and the blank line between the lists
        share = room // 2
        runs = min(len(federation.overview.runs) + 2, max(share, room - len(federation.clients) - 2))
        shown_runs = _lines(console, options, self._runs())
        shown_clients = _lines(console, options, self._clients())
        return [
            *_window(shown_runs, federation.names("runs"), self._at("runs"), runs, self.whole),
            *waiting,
            Text(),
            *_window(shown_clients, federation.names("clients"), self._at("clients"), room - runs, self.whole),
        ]

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
            best = measured(run.best if run.HasField("best") else None, run.metric)
            table.add_row(
                self._mark("runs", run.run_id), plain(run.run_id), state(run_state(run.state)), rounds_text(run),
                bar(run.rounds_done, run.rounds_planned, _BAR), plain(delivered(run)), best,
                sparkline([point.value for point in run.points], POINTS), time_left(run),
            )  # fmt: skip
        return table if self.federation.overview.runs else Text("no runs yet: `fl run create config.toml` makes one")

    def _waiting(self) -> list[Text]:
        """Whom active runs wait for, and what else needs attention."""
        since = time.monotonic() - self.federation.received
        lines = {name: line for name, run in self.federation.active.items() if (line := waits(run, since))}
        waiting = [Text(units.plain(f"{name}: {line}"), style=STYLES["warn"]) for name, line in lines.items()]
        others = (problem for problem in problems(self.federation.overview) if problem.run_id not in lines)
        waiting += [Text(units.plain(problem.text), style=STYLES[problem.tone]) for problem in others]
        return waiting[:_MOST_WAITING]

    def _clients(self) -> RenderableType:
        columns: dict[str, Callable[[admin_pb2.ClientStatus], Cell]] = {
            " ": lambda client: self._mark("clients", client.client_id),
            **{name: CLIENT_COLUMNS[name] for name in _CLIENT_COLUMNS},
            "State": lambda client: state(client_facts.words(client)),
        }
        optional = ("Note", "Transfer", "Refused", "Run", "Came last", "Counted", "Work", "Failed")
        table = FittedTable.of(self.federation.clients, columns, optional=optional, names_missing=False)
        return table if self.federation.clients else Text("no clients yet: `fl-client --config client.toml` starts one")


def _counts(of: str, counts: Mapping[str, int], order: Sequence[str]) -> Text:
    """A line such as: clients  12 present, 1 lost."""
    line = Text(f"{of}  ", style="bold")
    parts = [(name, counts[name]) for name in order if counts.get(name)]
    for number, (name, count) in enumerate(parts):
        line.append(", " if number else "", "none")
        line.append(f"{count:,} {mark_words(name, count)}", STYLES[tone(name)] or "none")
    return line if parts else line.append("none", "none")


def _lines(console: Console, options: ConsoleOptions, shown: RenderableType) -> list[Text]:
    """A rendering as lines with their styles."""
    lines = []
    for segments in console.render_lines(shown, options.update(height=None), pad=False):
        line = Text()
        for segment in Segment.simplify(segments):
            line.append(segment.text, segment.style)
        line.rstrip()
        lines.append(line)
    return lines


def _shared(texts: Sequence[list[Text]], room: int) -> list[Text]:
    """Lines of the first texts, as many as there is room for: one of each, and more of the first ones."""
    shown: list[Text] = []
    for number, lines in enumerate(texts[:room], 1):
        part = lines[: room - len(shown) - len(texts[number:room])]
        if len(part) < len(lines):
            part[-1].append(" …")
        shown += part
    return shown


def _window(lines: Sequence[Text], names: Sequence[str], at: int, room: int, whole: bool) -> list[Text]:
    """The part of a table around the chosen row that fits; its two lines of names stay."""
    if whole or len(lines) <= room or len(lines) < len(names):
        return list(lines[: None if whole else max(0, room)])
    head, rows = list(lines[: len(lines) - len(names)]), lines[len(lines) - len(names) :]
    space = max(1, room - len(head))
    first = max(0, min(at - space // 2, len(rows) - space))
    return [*head, *rows[first : first + space]][: max(0, room)]
