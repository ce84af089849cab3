"""`fl top`: the whole federation on the terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from fl_ops.admin import settings
from fl_ops.admin.client import AdminClient
from fl_ops.admin.watching import Feed, read
from fl_ops.commands.options import Context, admin_command, interruptible
from fl_ops.errors import UsageError
from fl_ops.render import output
from fl_ops.render.top import Federation, Selection, TopView, keys

_TICK_S = 1.0
"""The longest time between two drawings: deadlines count down."""
_PAGE = 10


@admin_command
def top(context: Context) -> None:
    """Show runs, clients and what waits, on the whole terminal, with every change.

    Arrows walk runs or clients, tab changes between them, enter shows details, esc goes back, q leaves.
    Without a terminal it prints one view.
    """
    server = settings.load(context.layer).server
    with context.connect() as client:
        first = read(client, server, Selection())
        if context.as_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
            context.show(_as_json(first), TopView(first, whole=True))
            if not context.as_json:
                print("fl top follows changes only where input and output are a terminal", file=sys.stderr)
            return
        if Console().is_dumb_terminal:
            raise UsageError(f"TERM={os.environ.get('TERM', '')}: expected a terminal that can move its cursor")
        with interruptible("the runs go on"):
            _Screen(client, first).run()


def _as_json(federation: Federation) -> dict[str, object]:
    return {"overview": output.to_json(federation.overview), "clients": output.to_json(list(federation.clients))}


class _Screen:
    """The loop of keys, changes and drawings. All drawing is in one thread."""

    def __init__(self, client: AdminClient, first: Federation) -> None:
        self._selection = Selection().fitting(first.names("runs"))
        self._feed = Feed(client, first)

    def run(self) -> None:
        """Show the view until q. The terminal is as before afterwards, whatever happens."""
        console = Console()
        with _keys_at_once(sys.stdin.fileno()), Live(console=console, screen=True, auto_refresh=False) as live:
            self._feed.start()
            try:
                while not self._selection.left:
                    live.update(TopView(self._feed.federation, self._selection, self._feed.lost), refresh=True)
                    self._wait()
            finally:
                self._feed.close()

    def _wait(self) -> None:
        ready, _, _ = select.select([sys.stdin.fileno(), self._feed.news], [], [], _TICK_S)
        if self._feed.news in ready:
            os.read(self._feed.news, 1024)
        federation = self._feed.federation
        names = federation.names(self._selection.list)
        self._selection = self._selection.fitting(names)
        if sys.stdin.fileno() in ready:
            typed = os.read(sys.stdin.fileno(), 1024).decode(errors="replace")
            for key in keys(typed) if typed else ["q"]:  # nothing: the terminal was closed
                self._selection = self._selection.after(key, names, _PAGE)
                names = federation.names(self._selection.list)
                self._selection = self._selection.fitting(names)
        self._feed.choose(self._selection)


@contextmanager
def _keys_at_once(terminal: int) -> Iterator[None]:
    """Keys arrive without enter and are not shown. Ctrl-C stays a signal."""
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
