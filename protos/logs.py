"""What both programs do to a line of their logs before it is written: bounded, folded, and without control characters.

Much of what is logged was written by the other side of the wire. So each value is cut and escaped in one place, and a
line that comes again and again about the same client is written a few times in a minute and then counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import structlog
from structlog.types import Processor

from protos.folding import Folded, Folding
from protos.text import escaped, shortened

WINDOW_S = 60.0
REPEATED = "repeated"
"""Key of a line that stands for several: how many more came within a minute, of which this is the latest."""
_ABOUT = ("client", "caller", "peer", "address")
"""Keys whose value says whom a line is about."""
_KINDS = ("rpc", "code", "run")
"""Keys whose values tell lines of one event apart."""
_DEPTH = 4
Event = MutableMapping[str, Any]
Key = tuple[str, ...]


def made_safe(_logger: object, _method: str, event: Event) -> Event:
    """A processor: every text in the line is bounded and escaped, whatever it is in."""
    return {escaped(str(key)): _safe(value, _DEPTH) for key, value in event.items()}


def exceptions_made_safe(_logger: object, _method: str, event: Event) -> Event:
    """A processor behind the one that puts a traceback into words: its lines stay lines."""
    if isinstance(words := event.get("exception"), str):
        event["exception"] = escaped(words, keep="\n")
    return event


def _safe(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return escaped(shortened(value))
    if depth and isinstance(value, Mapping):
        return {escaped(str(key)): _safe(each, depth - 1) for key, each in value.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_safe(each, depth - 1) for each in value]
    if value is None or isinstance(value, bool | int | float | BaseException):
        return value
    return escaped(shortened(str(value)))


class Folder:
    """A processor that lets so many lines of an event about one client through in a minute. Any thread may log."""

    def __init__(
        self, a_minute: int, clock: Callable[[], float] = time.monotonic, write: Callable[[Event], None] | None = None
    ) -> None:
        """a_minute: 0 for all. write: where the line goes that stands for others; None: to the log."""
        self._folding: Folding[Key, Event] = Folding(a_minute, WINDOW_S)
        self._clock, self._write = clock, write or _log
        self._lock = threading.RLock()

    def __call__(self, _logger: object, _method: str, event: Event) -> Event:
        """Raises DropEvent for a line that is counted instead."""
        if REPEATED in event:
            return event
        self.flush()
        about = [str(event[key]) for key in _ABOUT if key in event]
        if not about:
            return event
        kinds = [str(event[key]) for key in _KINDS if key in event]
        key = (str(event.get("event")), *(shortened(each, 100) for each in (*about, *kinds)))
        with self._lock:
            if self._folding.passes(key, dict(event), self._clock()):
                return event
        raise structlog.DropEvent

    def flush(self) -> None:
        """Write what was folded in windows that have ended."""
        with self._lock:
            ended = self._folding.over(self._clock())
        for folded in ended:
            self._write(_line_of(folded))


def _line_of(folded: Folded[Event]) -> Event:
    return {**folded.last, REPEATED: folded.count}


def _log(event: Event) -> None:
    """The line once more, with its count, through all processors."""
    values = {key: value for key, value in event.items() if key not in {"event", "level", "timestamp", "exc_info"}}
    getattr(structlog.get_logger(), str(event.get("level", "info")))(event.get("event"), **values)


def processors(renderer: Processor, limit: Processor | None = None) -> list[Processor]:
    """From a call of the log to its line. JSON is escaped like the rest: what reads it prints its values in the end.

    limit: drops or counts lines that come too often.
    """
    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        *([] if limit is None else [limit]),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        made_safe,
        structlog.processors.format_exc_info,
        exceptions_made_safe,
        renderer,
    ]


def for_people(*, colors: bool) -> Processor:
    """The renderer for a terminal. Tracebacks are text by then, and are printed as they are."""
    return structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)
