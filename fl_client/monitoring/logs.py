"""Logs to stdout: one JSON object a line or, on a terminal, coloured lines above a status line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import structlog
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from structlog import DropEvent
from structlog.typing import EventDict, Processor, WrappedLogger

from fl_common.logs import console_renderer, escaped, log_warnings, processors
from fl_common.rate_limits import RateLimiter

LINES_PER_S, LINE_BURST = 2.0, 1000
"""Limit of the lines of one event."""
MAX_EVENTS = 256
"""Event names with a limit of their own. The daemon itself has fewer."""


class LogRate:
    """A structlog processor that drops lines beyond a rate, so that no coordinator can fill the disk with logs.

    Each event has its own limit, so a flood of one hides no other. Its next line has the number of dropped ones.
    """

    def __init__(self, per_s: float = LINES_PER_S, burst: int = LINE_BURST) -> None:
        self._limit = per_s, burst
        self._limiters: dict[str, RateLimiter] = {}
        self._dropped: dict[str, int] = {}

    def __call__(self, _logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
        """The line, with the number of dropped lines before it. Raises DropEvent."""
        event = str(line.get("event"))
        if event not in self._limiters and len(self._limiters) >= MAX_EVENTS:
            event = ""
        if not self._limiters.setdefault(event, RateLimiter(*self._limit)).try_acquire():
            self._dropped[event] = self._dropped.get(event, 0) + 1
            raise DropEvent
        if dropped := self._dropped.pop(event, 0):
            line["lines_dropped"] = dropped
        return line


class Progress:
    """The current activity as one line that is rewritten in place. Silent without a terminal."""

    def __init__(self, status: Status | None = None) -> None:
        self._status = status

    def show(self, activity: str) -> None:
        """Show an activity: "waiting for work", "run, round 3: step 4 of 40"."""
        if self._status is not None:
            self._status.update(escape(escaped(activity)))


@contextmanager
def logging(mode: Literal["auto", "json", "pretty"]) -> Iterator[Progress]:
    """Set up structlog for the process. Returns the status line. "auto": pretty on a terminal, else JSON."""
    if mode == "json" or (mode == "auto" and not sys.stdout.isatty()):
        _configure(structlog.processors.JSONRenderer())
        yield Progress()
        return
    _configure(console_renderer(colors=sys.stdout.isatty()))
    console = Console()
    with Status("starting", console=console, refresh_per_second=4) as status:
        yield Progress(status)


def _configure(renderer: Processor) -> None:
    structlog.configure(
        processors=processors(renderer, LogRate()),
        # sys.stdout is read for each line: rich replaces it to keep the status line below the log.
        logger_factory=lambda *_: _StdoutLogger(),
        cache_logger_on_first_use=False,
    )
    log_warnings()


class _StdoutLogger:
    def msg(self, line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    debug = info = warning = error = critical = exception = msg
