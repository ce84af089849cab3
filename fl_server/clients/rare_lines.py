"""Lines of history that a client causes by coming and going: a client that does so without end fills no ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from fl_server.store.base import HistoryRecord
from protos.folding import Folding

WINDOW_S = 60.0


class RareLines:
    """Lets so many lines a minute through for each client and event; then one line says how many there were more.

    Lives on the event loop. What was folded when the process ends is not written.
    """

    def __init__(self, a_minute: int, write: Callable[[HistoryRecord], None]) -> None:
        """write: called with the line that stands for those that were folded, when their minute is over."""
        self._folding: Folding[tuple[str, str], HistoryRecord] = Folding(a_minute, WINDOW_S, kinds=1 << 20)
        self._write = write
        self._timer: asyncio.TimerHandle | None = None

    def passed(self, why: HistoryRecord) -> HistoryRecord | None:
        """The line if it is to be written now, else None."""
        now = time.monotonic()
        self._flush()
        if self._folding.passes((why.subject, why.event), why, now):
            return why
        if self._timer is None:
            left = self._folding.next_end(now)
            self._timer = asyncio.get_running_loop().call_later(left or 0.0, self._ended)
        return None

    def forget(self, client_id: str, *events: str) -> None:
        """The client's next lines are the first of their kind."""
        for event in events:
            self._folding.forget((client_id, event))

    def _ended(self) -> None:
        self._timer = None
        self._flush()
        left = self._folding.next_end(time.monotonic())
        if left is not None:
            self._timer = asyncio.get_running_loop().call_later(left + 0.02, self._ended)

    def _flush(self) -> None:
        for folded in self._folding.over(time.monotonic()):
            times = "once more" if folded.count == 1 else f"{folded.count} times more"
            self._write(replace(folded.last, detail=f"{times} within a minute, the last one: {folded.last.detail}"))
