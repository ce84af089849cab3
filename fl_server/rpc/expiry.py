"""Calls that are open when their caller's certificate ends: they end within about a second.

The transport looks at a certificate in the handshake only, and a stream may be open for months. The clock on the wall
is what a certificate goes by, and it may be set, so it is looked at again and again instead of being waited for once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fl_server.errors import CertificateEnded
from fl_server.identity import Identity

LOOK_S = 1.0
"""Between two looks at the clock, while a call is open that can be ended by it."""


class OpenCalls:
    """The streams of one server, by when their callers' certificates end. Lives on the event loop."""

    def __init__(self) -> None:
        self._by_end: dict[float, set[asyncio.Task[object]]] = {}
        self._ended: set[asyncio.Task[object]] = set()
        """Cancelled here, and by nobody else."""
        self._looking: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._by_end.values()))

    @contextmanager
    def while_valid(self, who: Identity) -> Iterator[None]:
        """The call of the current task, for as long as the block lasts. Raises CertificateEnded when it has to end."""
        task = asyncio.current_task()
        if who.ends is None or task is None:
            yield
            return
        self._by_end.setdefault(who.ends, set()).add(task)
        self._look_later()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            raise CertificateEnded(str(who), who.ends) from None
        finally:
            self._ended.discard(task)
            self._forget(who.ends, task)

    def _forget(self, ends: float, task: asyncio.Task[object]) -> None:
        if (calls := self._by_end.get(ends)) is not None:
            calls.discard(task)
            if not calls:
                del self._by_end[ends]

    def _look_later(self) -> None:
        if self._looking is None and self._by_end:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._looking, now = None, time.time()
        for ends in [each for each in self._by_end if each <= now]:
            for task in self._by_end.pop(ends):
                self._ended.add(task)
                task.cancel()
        self._look_later()
