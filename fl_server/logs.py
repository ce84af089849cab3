"""Logs are events: pretty on a terminal, JSON lines otherwise, always to stdout."""

from __future__ import annotations

import asyncio
import sys

import structlog

from protos.logs import Folder, for_people, processors

FLUSH_S = 5.0
"""Between two looks for lines that were folded and are to be told."""


def set_up_logs(style: str, lines_per_minute: int) -> Folder:
    """Set up structlog for the process, and hand out what folds its lines.

    style: "json", "pretty", or "auto": pretty on a terminal. lines_per_minute: of one event about one client; 0: all.
    """
    pretty = style == "pretty" or (style == "auto" and sys.stdout.isatty())
    folder = Folder(lines_per_minute)
    renderer = for_people(colors=sys.stdout.isatty()) if pretty else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=processors(renderer, folder),
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    return folder


async def keep_telling(folder: Folder) -> None:
    """Write for ever what was folded, also where nothing else is logged."""
    while True:
        await asyncio.sleep(FLUSH_S)
        folder.flush()
