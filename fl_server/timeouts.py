"""Time limits for the waits of thousands of calls, with one timer of the event loop for all of them.

`asyncio.timeout` sets and cancels a timer for every message that is waited for. With a thousand uploads that takes a
tenth of the coordinator's time. Nearly all waits end long before their limit, so here the timer just stays.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

_LEAST_S = 0.01
"""Least time between two checks of all waits."""


class TimeLimit:
    """`with TimeLimit(seconds):` raises TimeoutError when what is awaited in the block takes longer."""

    __slots__ = ("_before", "_ends", "_expired", "_seconds", "_task", "_waits")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expired = False

    def __enter__(self) -> Self:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is None:
            raise RuntimeError("expected a task that waits")
        self._task, self._before = task, task.cancelling()
        self._ends = loop.time() + self._seconds
        self._waits = _WAITS.get(loop) or _WAITS.setdefault(loop, _Waits())
        self._waits.add(self, self._ends)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._waits.remove(self)
        # As in `asyncio.timeout`: a cancellation from elsewhere is no timeout.
        if self._expired and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        """The time is over: interrupt the wait."""
        self._expired = True
        self._task.cancel()


class _Waits:
    """The open waits of one event loop."""

    def __init__(self) -> None:
        self._ends: dict[TimeLimit, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, wait: TimeLimit, ends: float) -> None:
        self._ends[wait] = ends
        if self._timer is None or ends < self._timer.when():
            self._set_timer(ends)

    def remove(self, wait: TimeLimit) -> None:
        self._ends.pop(wait, None)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._check)

    def _check(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        for wait in [wait for wait, ends in self._ends.items() if ends <= now]:
            del self._ends[wait]
            wait.expire()
        if self._ends:
            self._set_timer(max(min(self._ends.values()), now + _LEAST_S))


_WAITS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Waits] = WeakKeyDictionary()
