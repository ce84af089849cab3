"""Logs are events: pretty on a terminal, JSON lines otherwise, always to stdout."""

from __future__ import annotations

import sys

import structlog


def set_up_logs(style: str) -> None:
    """style: "json", "pretty", or "auto": pretty on a terminal."""
    pretty = style == "pretty" or (style == "auto" and sys.stdout.isatty())
    renderer = structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if pretty else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
