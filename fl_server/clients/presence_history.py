"""History rows that clients cause by registering again and again, limited to a few a minute for each client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from fl_common.logs import RepeatLimiter
from fl_server.store.records import HistoryRecord

WINDOW_S = 60.0


class PresenceHistory:
    """Passes a number of rows a minute for each client and event; one more row counts the others.

    Lives on the event loop. Rows that are still being counted when the process ends are not written.
    """

    def __init__(self, rows_per_minute: int, write: Callable[[HistoryRecord], None]) -> None:
        """write: called at the end of a minute with the row that counts the others."""
        self._limiter: RepeatLimiter[tuple[str, str], HistoryRecord] = RepeatLimiter(
            rows_per_minute, WINDOW_S, kinds=1 << 20
        )
        self._write = write
        self._timer: asyncio.TimerHandle | None = None

    def passed(self, row: HistoryRecord) -> HistoryRecord | None:
        """The row if it is to be written now; None if it is only counted."""
        now = time.monotonic()
        self._flush()
        if self._limiter.allow((row.subject, row.event), row, now):
            return row
        if self._timer is None:
            left = self._limiter.next_end(now)
            self._timer = asyncio.get_running_loop().call_later(left or 0.0, self._window_ended)
        return None

    def forget(self, client_id: str, *events: str) -> None:
        """Drop what was counted for a client."""
        for event in events:
            self._limiter.forget((client_id, event))

    def _window_ended(self) -> None:
        self._timer = None
        self._flush()
        left = self._limiter.next_end(time.monotonic())
        if left is not None:
            self._timer = asyncio.get_running_loop().call_later(left + 0.02, self._window_ended)

    def _flush(self) -> None:
        for suppressed in self._limiter.take_ended(time.monotonic()):
            times = "once more" if suppressed.count == 1 else f"{suppressed.count} times more"
            self._write(
                replace(suppressed.last, detail=f"{times} within a minute, the last one: {suppressed.last.detail}")
            )
