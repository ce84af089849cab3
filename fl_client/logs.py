"""Logs to stdout: one JSON object a line, or, on a terminal, coloured lines above a status line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import structlog
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from structlog.types import Processor

from fl_client.settings.log_rate import LogRate
from protos.logs import for_people, processors
from protos.text import escaped


class Progress:
    """What the daemon is doing, as one line that is rewritten in place; silent where there is no terminal."""

    def __init__(self, status: Status | None = None) -> None:
        self._status = status

    def say(self, state: str) -> None:
        """Show a state: "waiting for work", "round 3: step 4 of 40, loss 0.31"."""
        if self._status is not None:
            self._status.update(escape(escaped(state)))


@contextmanager
def logging(mode: Literal["auto", "json", "pretty"]) -> Iterator[Progress]:
    """Set up structlog for the process, and hand out the status line. "auto": whichever suits stdout."""
    if mode == "json" or (mode == "auto" and not sys.stdout.isatty()):
        _configure(structlog.processors.JSONRenderer())
        yield Progress()
        return
    _configure(for_people(colors=sys.stdout.isatty()))
    console = Console()
    with Status("starting", console=console, refresh_per_second=4) as status:
        yield Progress(status)


def _configure(renderer: Processor) -> None:
    structlog.configure(
        processors=processors(renderer, LogRate()),
        # stdout is looked up at each line: rich puts itself there to keep the status line below the log.
        logger_factory=lambda *_: _StdoutLogger(),
        cache_logger_on_first_use=False,
    )


class _StdoutLogger:
    def msg(self, line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    debug = info = warning = error = critical = exception = msg
