"""Log set-up of both programs: values are shortened and escaped, and repeated lines are counted instead of written.

Many logged values come from the other side of the wire, so one processor makes all of them safe to print. A line that
repeats for one client is written a few times a minute; the rest of the minute is summed up in one line.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog
from structlog.types import Processor

MAX_CHARACTERS = 2000
"""Longest text of one value in a log line."""
MAX_TRACEBACK = 20_000
"""The same for a traceback."""
WINDOW_S = 60.0
FLUSH_S = 5.0
"""Period at which counted repetitions are written."""
REPEATED = "repeated"
"""Key of a line that stands for suppressed lines: their number in a minute. The line is the latest of them."""
_PEER_KEYS = ("client", "caller", "peer", "address")
"""Keys that name the peer a line is about. Only lines with one of them are limited."""
_KIND_KEYS = ("rpc", "code", "run")
"""Keys that separate lines of one event."""
_MAX_DEPTH = 4
Event = MutableMapping[str, Any]
Key = tuple[str, ...]
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def escaped(text: str, keep: str = "") -> str:
    """The text with every unprintable character replaced by its Python escape, so that it cannot control a terminal.

    Replaced are control characters (C0, C1, DEL, ESC), line and paragraph separators, marks that change the writing
    direction, zero-width characters and lone surrogates. keep: characters that stay.
    """
    if text.isprintable():
        return text
    kept = (it if it.isprintable() or it in keep else it.encode("unicode_escape").decode("ascii") for it in text)
    return "".join(kept)


def shortened(text: str, most: int = MAX_CHARACTERS) -> str:
    """The text, or its first `most` characters and the number of those that follow."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most} characters more)"


@dataclass(slots=True)
class _Window(Generic[T]):
    began: float
    last: T
    lines: int = 0
    suppressed: int = 0


@dataclass(frozen=True, slots=True)
class Suppressed(Generic[T]):
    """Lines of one kind that were not written."""

    last: T
    """The latest of them."""
    count: int


class RepeatLimiter(Generic[K, T]):
    """Limits the lines of each kind per time window and counts the suppressed ones. Not thread-safe.

    It reads no clock: times are arguments, in seconds of a monotonic clock.
    """

    def __init__(self, limit: int, window_s: float, kinds: int = 4096) -> None:
        """limit: lines of one kind in a window; 0 for no limit. kinds: most windows that are open at once."""
        self._limit, self._window_s, self._kinds = limit, window_s, kinds
        self._windows: OrderedDict[K, _Window[T]] = OrderedDict()
        """Open windows by kind, in the order in which they began."""

    def __len__(self) -> int:
        return len(self._windows)

    def allow(self, kind: K, line: T, now: float) -> bool:
        """Whether to write the line. Call `take_ended` first: it ends the windows that are over."""
        if not self._limit:
            return True
        window = self._windows.get(kind)
        if window is None:
            window = self._windows[kind] = _Window(now, line)
        window.lines += 1
        if window.lines <= self._limit:
            return True
        window.last, window.suppressed = line, window.suppressed + 1
        return False

    def take_ended(self, now: float) -> list[Suppressed[T]]:
        """End the windows that are over, and the oldest where there are too many. Returns what they suppressed."""
        ended = []
        while self._windows:
            kind, window = next(iter(self._windows.items()))
            if now - window.began < self._window_s and len(self._windows) < self._kinds:
                break
            del self._windows[kind]
            if window.suppressed:
                ended.append(Suppressed(window.last, window.suppressed))
        return ended

    def next_end(self, now: float) -> float | None:
        """Seconds until the next window ends; None if no window is open."""
        first = next(iter(self._windows.values()), None)
        return None if first is None else max(0.0, first.began + self._window_s - now)

    def forget(self, kind: K) -> None:
        """Drop the window of this kind: its next line starts a new one."""
        self._windows.pop(kind, None)


class RepeatFilter:
    """A structlog processor that limits the lines of one event about one peer per minute. Thread-safe."""

    def __init__(
        self, per_minute: int, clock: Callable[[], float] = time.monotonic, write: Callable[[Event], None] | None = None
    ) -> None:
        """per_minute: 0 for no limit. write: writes the line that stands for suppressed ones; default: to the log."""
        self._limiter: RepeatLimiter[Key, Event] = RepeatLimiter(per_minute, WINDOW_S)
        self._clock, self._write = clock, write or _log
        self._lock = threading.RLock()

    def __call__(self, _logger: object, _method: str, event: Event) -> Event:
        """Raises DropEvent for a line that is suppressed."""
        if REPEATED in event:
            return event
        self.flush()
        peers = [str(event[key]) for key in _PEER_KEYS if key in event]
        if not peers:
            return event
        kinds = [str(event[key]) for key in _KIND_KEYS if key in event]
        key = (str(event.get("event")), *(shortened(key, 100) for key in (*peers, *kinds)))
        with self._lock:
            if self._limiter.allow(key, dict(event), self._clock()):
                return event
        raise structlog.DropEvent

    def flush(self) -> None:
        """Write one line for each window that is over and suppressed lines."""
        with self._lock:
            ended = self._limiter.take_ended(self._clock())
        for suppressed in ended:
            self._write({**suppressed.last, REPEATED: suppressed.count})


def _log(event: Event) -> None:
    """Log the line again through all processors."""
    values = {key: value for key, value in event.items() if key not in {"event", "level", "timestamp", "exc_info"}}
    getattr(structlog.get_logger(), str(event.get("level", "info")))(event.get("event"), **values)


def processors(renderer: Processor, limit: Processor | None = None) -> list[Processor]:
    """structlog's processors from a log call to its line. JSON is escaped too: its readers print the values.

    limit: drops lines that repeat too often.
    """
    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        *([] if limit is None else [limit]),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _escape_values,
        structlog.processors.format_exc_info,
        _escape_traceback,
        renderer,
    ]


def console_renderer(*, colors: bool) -> Processor:
    """The renderer for a terminal. Tracebacks are text already and are printed unchanged."""
    return structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)


def _escape_values(_logger: object, _method: str, event: Event) -> Event:
    """A processor that shortens and escapes every text of the line, also inside lists and mappings.

    A traceback that the caller has written as text keeps its line breaks: see `_escape_traceback`.
    """
    return {
        escaped(str(key)): value if key == "exception" else _safe(value, _MAX_DEPTH) for key, value in event.items()
    }


def _escape_traceback(_logger: object, _method: str, event: Event) -> Event:
    """A processor behind `format_exc_info` that escapes the traceback and keeps its line breaks."""
    if isinstance(text := event.get("exception"), str):
        event["exception"] = escaped(shortened(text, MAX_TRACEBACK), keep="\n")
    return event


def _safe(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return escaped(shortened(value))
    if depth and isinstance(value, Mapping):
        return {escaped(str(key)): _safe(member, depth - 1) for key, member in value.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_safe(member, depth - 1) for member in value]
    if value is None or isinstance(value, bool | int | float | BaseException):
        return value
    return escaped(shortened(str(value)))


def log_warnings() -> None:
    """Write Python's warnings as lines of the log: as text on stderr they would stand between lines of JSON."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
    ) -> None:
        place = f"{filename}:{lineno}"
        structlog.get_logger().warning("python_warning", kind=category.__name__, what=str(message), place=place)

    warnings.showwarning = show


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
    log_warnings()
    return repeats


async def write_repeat_counts(repeats: RepeatFilter) -> None:
    """Write counted repetitions periodically, without end, even if nothing else is logged."""
    while True:
        await asyncio.sleep(FLUSH_S)
        repeats.flush()
