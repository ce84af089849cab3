"""Following a run to its end: a live table on a terminal, lines elsewhere, JSON lines for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console
from rich.live import Live

from fl_ops import output
from fl_ops.errors import Exit, Unreachable
from fl_ops.states import run_state
from fl_ops.tables import live_table
from fl_ops.units import plain
from fl_ops.watch import RunProgress, event_line, exit_code
from protos.fl.v1 import admin_pb2

Show = Callable[[admin_pb2.WatchRunResponse, RunProgress], None]


def follow(events: Iterable[admin_pb2.WatchRunResponse], as_json: bool, console: Console | None = None) -> Exit:
    """Shows `events` as they come. Returns how the run ended.

    Raises:
        Unreachable: the stream ended and the run had not.
    """
    console = console or Console()
    progress = RunProgress()
    with _display(as_json, console) as show:
        for seen in events:
            progress.feed(seen)
            show(seen, progress)
    code = exit_code(progress.run)
    if code is None:
        raise Unreachable(
            f"the coordinator ended the stream while the run was {run_state(progress.run)}: it may be restarting, and "
            "the run goes on with it; `fl run watch` again"
        )
    return code


def _display(as_json: bool, console: Console) -> AbstractContextManager[Show]:
    if as_json:
        return nullcontext(lambda seen, progress: output.show_line(seen))
    if console.is_terminal:
        return _LiveDisplay(console)
    return nullcontext(lambda seen, progress: _print_line(console, seen))


def _print_line(console: Console, seen: admin_pb2.WatchRunResponse) -> None:
    line = event_line(seen)
    if line is not None:
        # soft_wrap: a line of a log stays one line.
        console.print(plain(line), markup=False, highlight=False, soft_wrap=True)


class _LiveDisplay(AbstractContextManager[Show]):
    """A table that is drawn anew in place; what it showed last stays on the screen."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8)

    def __enter__(self) -> Show:
        self._live.__enter__()
        return lambda seen, progress: self._live.update(live_table([progress]))

    def __exit__(self, *error: object) -> None:
        self._live.stop()
