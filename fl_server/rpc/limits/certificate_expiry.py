"""Ends open calls within about a second after their caller's certificate or token has expired.

The transport checks a certificate only in the handshake, and a stream may be open for months. Expiry is a time of the
wall clock, which may be set, so the clock is read periodically instead of being waited for once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fl_server.identity import Identity

CHECK_S = 1.0
"""Period of the checks, while such a call is open."""


class ExpiringCalls:
    """The open calls of one server, by the end of their callers' certificates. Lives on the event loop."""

    def __init__(self) -> None:
        self._by_end: dict[float, set[asyncio.Task[object]]] = {}
        self._ended: set[asyncio.Task[object]] = set()
        """Tasks that were cancelled here."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._by_end.values()))

    @contextmanager
    def while_valid(self, who: Identity) -> Iterator[None]:
        """Register the current task's call as long as the block. Raises CertificateEnded when the certificate ends."""
        task = asyncio.current_task()
        if who.ends is None or task is None:
            yield
            return
        self._by_end.setdefault(who.ends, set()).add(task)
        self._check_later()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            raise who.ended() from None
        finally:
            self._ended.discard(task)
            self._forget(who.ends, task)

    def _forget(self, ends: float, task: asyncio.Task[object]) -> None:
        if (calls := self._by_end.get(ends)) is not None:
            calls.discard(task)
            if not calls:
                del self._by_end[ends]

    def _check_later(self) -> None:
        if self._timer is None and self._by_end:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)

    def _check(self) -> None:
        self._timer, now = None, time.time()
        for ends in [each for each in self._by_end if each <= now]:
            for task in self._by_end.pop(ends):
                self._ended.add(task)
                task.cancel()
        self._check_later()
