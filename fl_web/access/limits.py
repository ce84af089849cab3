"""Limits of failed logins and of open event streams."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

FAILURES, FAILURES_S = 10, 60.0
"""Failed logins of one caller, and the time in which so many are allowed."""
CALLERS = 4096
"""Callers that are remembered."""
STREAMS_PER_SESSION, STREAMS = 100, 500
"""Open event streams of one browser, and of all."""


class FailedLogins:
    """Counts failed logins by caller: an address or a certificate. Known secrets are not asked to wait."""

    def __init__(self) -> None:
        self._failed: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Begin of the time, by the monotonic clock, and failures in it, by caller."""

    def wait_s(self, caller: str) -> float:
        """Seconds that a caller has to wait; 0: it may try."""
        began, count = self._failed.get(caller, (0.0, 0))
        return max(0.0, began + FAILURES_S - time.monotonic()) if count >= FAILURES else 0.0

    def add(self, caller: str) -> None:
        """A login of a caller failed."""
        now = time.monotonic()
        began, count = self._failed.pop(caller, (now, 0))
        self._failed[caller] = (now, 1) if now - began >= FAILURES_S else (began, count + 1)
        if len(self._failed) > CALLERS:
            self._failed.popitem(last=False)


class TooManyStreams(Exception):
    """One more event stream would be over a limit."""


class OpenStreams:
    """Counts open event streams."""

    def __init__(self, per_session: int = STREAMS_PER_SESSION, in_all: int = STREAMS) -> None:
        self._per_session, self._in_all = per_session, in_all
        self._open: Counter[str] = Counter()

    @contextmanager
    def opened(self, session: str) -> Iterator[None]:
        """A stream of a session. Raises TooManyStreams."""
        if self._open.total() >= self._in_all:
            raise TooManyStreams(f"{self._in_all} pages are open, which is the limit of this process")
        if self._open[session] >= self._per_session:
            raise TooManyStreams(f"this browser has {self._per_session} pages open, which is the limit")
        self._open[session] += 1
        try:
            yield
        finally:
            self._open[session] -= 1
            if not self._open[session]:
                del self._open[session]
