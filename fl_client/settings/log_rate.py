"""A rate limit for the log: whatever a coordinator makes the daemon say, it does not fill a disk.

Each event has its own limit: a flood of one hides no other. The next line of the event says how many are missing.
"""

from __future__ import annotations

from structlog import DropEvent
from structlog.typing import EventDict, WrappedLogger

from fl_client.connection.pace import Pace

LINES_PER_S, LINES_AT_ONCE = 2.0, 1000
"""Of one event, in the long run and at once."""
EVENTS = 256
"""Names of events that are counted apart; the daemon itself has fewer."""


class LogRate:
    """A structlog processor that drops what comes too often."""

    def __init__(self, per_s: float = LINES_PER_S, at_once: int = LINES_AT_ONCE) -> None:
        self._limit = per_s, at_once
        self._paces: dict[str, Pace] = {}
        self._dropped: dict[str, int] = {}

    def __call__(self, _logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
        """The line, with the number of those that are missing before it. Raises DropEvent."""
        event = str(line.get("event"))
        if event not in self._paces and len(self._paces) >= EVENTS:
            event = ""
        if not self._paces.setdefault(event, Pace(*self._limit)).free():
            self._dropped[event] = self._dropped.get(event, 0) + 1
            raise DropEvent
        if dropped := self._dropped.pop(event, 0):
            line["lines_dropped"] = dropped
        return line
