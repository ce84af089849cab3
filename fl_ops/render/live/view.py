"""Shows the events of a run until it ends: a live table on a terminal, lines elsewhere, JSON lines for programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console
from rich.live import Live

from fl_common.units import plain
from fl_ops.errors import Exit, Unreachable
from fl_ops.render import output
from fl_ops.render.live.table import LiveTable
from fl_ops.render.runs.progress import Lost, RunProgress, event_line, exit_code
from fl_ops.render.states import run_state
from protos.fl.v1 import admin_pb2

Shown = admin_pb2.WatchRunResponse | Lost
ShowEvent = Callable[[Shown, RunProgress], None]
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
    live, progress = console.is_terminal and not as_json, RunProgress()
    if live:
        before = earlier()
        progress.run = before.run
        for summary in before.rounds:
            progress.add_round(summary)
    with _display(as_json, console) as show, beside(progress) if live else nullcontext():
        for event in events:
            if isinstance(event, Lost):
                progress.lost = _LOST
            else:
                progress.add(event)
            show(event, progress)
    code = exit_code(progress.run)
    if code is None:
        raise Unreachable(
            f"the coordinator ended the stream while the run was {run_state(progress.run)}: it may be restarting, and "
            "the run continues afterwards; use `fl run watch` again"
        )
    return code


def _display(as_json: bool, console: Console) -> AbstractContextManager[ShowEvent]:
    if as_json:
        return nullcontext(_print_json)
    if console.is_terminal:
        return _LiveDisplay(console)
    return nullcontext(lambda event, progress: _print_line(console, event))


def _print_json(event: Shown, _progress: RunProgress) -> None:
    """stdout is for objects only."""
    if isinstance(event, Lost):
        print(_LOST, file=sys.stderr, flush=True)
    else:
        output.show_line(event)


def _print_line(console: Console, event: Shown) -> None:
    line = _LOST if isinstance(event, Lost) else event_line(event)
    if line is not None:
        # soft_wrap: a line of a log stays one line.
        console.print(plain(line), markup=False, highlight=False, soft_wrap=True)
        console.file.flush()


class _LiveDisplay(AbstractContextManager[ShowEvent]):
    """A table that is redrawn in place; its last state stays on the screen."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8)

    def __enter__(self) -> ShowEvent:
        self._live.__enter__()
        return lambda event, progress: self._live.update(LiveTable(progress))

    def __exit__(self, *error: object) -> None:
        self._live.stop()
