"""Log set-up: events to stdout, pretty on a terminal and JSON lines otherwise."""

from __future__ import annotations

import asyncio
import sys

import structlog

from fl_common.logs import RepeatFilter, console_renderer, processors

FLUSH_S = 5.0
"""Period at which counted repetitions are written."""


def set_up_logs(style: str, lines_per_minute: int) -> RepeatFilter:
    """Set up structlog for the process. Returns the filter, which limits repeated lines.

    style: "json", "pretty", or "auto": pretty on a terminal.
    lines_per_minute: of one event about one client; 0: no limit.
    """
    pretty = style == "pretty" or (style == "auto" and sys.stdout.isatty())
    repeats = RepeatFilter(lines_per_minute)
    renderer = console_renderer(colors=sys.stdout.isatty()) if pretty else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=processors(renderer, repeats),
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    return repeats


async def write_repeat_counts(repeats: RepeatFilter) -> None:
    """Write counted repetitions periodically, without end, even if nothing else is logged."""
    while True:
        await asyncio.sleep(FLUSH_S)
        repeats.flush()
