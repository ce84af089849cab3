"""Messages of an event stream, as https://html.spec.whatwg.org/multipage/server-sent-events.html defines them."""

from __future__ import annotations

import json
from typing import Any

RETRY_MS = 1500
"""Wait of a browser before it connects again."""


def message(event: str, data: Any, number: int | None = None) -> bytes:
    """One event. number: of the history, up to which the browser has everything with this event."""
    lines = [f"event: {event}", f"data: {json.dumps(data, separators=(',', ':'), allow_nan=False)}"]
    if number is not None:
        lines.insert(0, f"id: {number}")
    return "\n".join([*lines, "", ""]).encode()


def opening() -> bytes:
    """The first bytes of a stream: the wait before a new connection."""
    return f"retry: {RETRY_MS}\n\n".encode()


KEEPALIVE = b": keepalive\n\n"
"""A comment: it shows a proxy, and a server whose browser has gone, that the stream is open."""
