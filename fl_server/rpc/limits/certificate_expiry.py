"""Ends open calls soon after their caller's certificate or token has expired, and at once when it is revoked.

The transport checks a certificate only in the handshake, and a stream may be open for months. Expiry is a time of the
wall clock, which may be set, so the clock is read periodically instead of being waited for once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fl_server.errors import Revoked, ServerError
from fl_server.identity import Identity

CHECK_S = 1.0
"""Period of the checks, while such a call is open."""


class ExpiringCalls:
    """The open calls of one server, by the end of their callers' certificates. Lives on the event loop."""

    def __init__(self) -> None:
        self._by_end: dict[float, dict[asyncio.Task[object], Identity]] = {}
        self._ended: dict[asyncio.Task[object], ServerError] = {}
        """Tasks that were cancelled here, and why."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._by_end.values()))

    @contextmanager
    def while_valid(self, who: Identity) -> Iterator[None]:
        """Register the current task's call as long as the block.

        Raises CertificateEnded when the certificate ends, Revoked when it is revoked.
        """
        task = asyncio.current_task()
        if who.ends is None or task is None:
            yield
            return
        self._by_end.setdefault(who.ends, {})[task] = who
        self._check_later()
        try:
            yield
        except asyncio.CancelledError:
            if (why := self._ended.get(task)) is None:
                raise
            task.uncancel()
            raise why from None
        finally:
            self._ended.pop(task, None)
            self._forget(who.ends, task)

    def end_denied(self, denied: Callable[[Identity], str]) -> int:
        """End the calls of callers for which `denied` gives a reason. Returns their number."""
        calls = [(task, who) for same_end in self._by_end.values() for task, who in same_end.items()]
        found = [(task, Revoked(str(who), why)) for task, who in calls if (why := denied(who))]
        for task, revoked in found:
            self._end(task, revoked)
        return len(found)

    def _forget(self, ends: float, task: asyncio.Task[object]) -> None:
        if (calls := self._by_end.get(ends)) is not None:
            calls.pop(task, None)
            if not calls:
                del self._by_end[ends]

    def _check_later(self) -> None:
        if self._timer is None and self._by_end:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)

    def _check(self) -> None:
        self._timer, now = None, time.time()
        for ends in [each for each in self._by_end if each <= now]:
            for task, who in self._by_end.pop(ends).items():
                self._end(task, who.ended())
        self._check_later()

    def _end(self, task: asyncio.Task[object], why: ServerError) -> None:
        if task not in self._ended:
            self._ended[task] = why
            task.cancel()
