"""New lines of the history for all who watch it: each is read from the ledger once, however many watch.

The ledger calls `HistoryFeed` after each transaction with such lines. A watcher that has fallen behind, or begins with
an older line, reads the lines that it lacks from the ledger by itself, and then waits with the others. So no watcher
makes another one wait, and nothing is queued for a slow one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fl_server.store.database.store import Store
from fl_server.store.errors import StoreError, StoreTakenOver
from fl_server.store.records import HistoryRecord

T = TypeVar("T")

TAIL = 2000
"""Newest lines in memory while anybody watches."""
AT_ONCE = 250
"""Lines in one read, and in one batch for a watcher."""
PAUSE_S = 0.1
"""Least time between two reads: what thousands of clients cause in it becomes one."""
RETRY_S = 2.0
"""Wait after a read that failed."""
_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the history."""

    number: int
    record: HistoryRecord
    _shown: list[Any] = field(default_factory=list, compare=False, repr=False)

    def shown(self, make: Callable[[int, HistoryRecord], T]) -> T:
        """What watchers are sent of it, made once."""
        if not self._shown:
            self._shown.append(make(self.number, self.record))
        shown: T = self._shown[0]
        return shown


@dataclass(frozen=True, slots=True)
class Batch:
    """Lines for one watcher."""

    lines: list[Line]
    """The lines in order of number."""
    last: int
    """There are no other lines up to this number."""


class HistoryFeed:
    """The watchers of a ledger's history. Lives on the event loop."""

    def __init__(self, store: Store, do: Callable[..., Awaitable[Any]]) -> None:
        """do: calls a method of the store in its thread."""
        self._store, self._do = store, do
        self._watchers = 0
        self._following: asyncio.Task[None] | None = None
        self._written, self._news = asyncio.Event(), asyncio.Event()
        """Set by the store: there are new lines; and set for watchers, once each: they were read."""
        self._tail: deque[Line] = deque()
        self._before_tail = self._last = 0
        """Every line with a number over the first one and up to the second one is in the tail."""
        self._begun: asyncio.Future[None]
        """Set while anybody watches: done when the newest line is known."""

    @property
    def watchers(self) -> int:
        """How many watch now."""
        return self._watchers

    async def newest(self) -> int:
        """The number of the newest line; 0: there is none."""
        span: tuple[int, int] = await self._do(self._store.history_span, "", 1)
        return max(span[1], 0)

    async def after(self, number: int | None, subject: str = "") -> AsyncGenerator[Batch, None]:
        """Yields the lines after a number, then new ones for as long as this is read. The first batch comes at once.

        Args:
            number: one above the newest line's counts as that; None: only lines from now on.
            subject: only lines about it; "" for all.
        """
        with self._watching() as begun:
            await asyncio.shield(begun)
            position, is_first = self._last if number is None else min(number, self._last), True
            while True:
                news = self._news
                batch = await self._next(position, subject)
                if batch.lines or is_first:
                    yield batch
                if batch.last == position:
                    await news.wait()
                position, is_first = batch.last, False

    async def _next(self, position: int, subject: str) -> Batch:
        last = self._last
        if position >= last:
            return Batch([], position)
        if position < self._before_tail:
            entries = await self._do(self._store.history_between, subject, (position + 1, last), AT_ONCE)
            return Batch([Line(*row) for row in entries], entries[-1][0] if len(entries) == AT_ONCE else last)
        lines: list[Line] = []
        for line in reversed(self._tail):
            if line.number <= position:
                break
            lines.append(line)
        lines = lines[: -AT_ONCE - 1 : -1]
        last = lines[-1].number if len(lines) == AT_ONCE else last
        return Batch([line for line in lines if not subject or line.record.subject == subject], last)

    @contextmanager
    def _watching(self) -> Iterator[asyncio.Future[None]]:
        """A watcher. The future is done when the newest line is known."""
        self._watchers += 1
        if self._following is None:
            loop = asyncio.get_running_loop()
            self._begun, self._written = loop.create_future(), asyncio.Event()
            self._store.after_history(lambda: loop.call_soon_threadsafe(self._written.set))
            self._following = asyncio.create_task(self._follow(self._begun))
        try:
            yield self._begun
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._store.after_history(None)
                self._tail.clear()
                if self._following is not None:
                    self._following.cancel()
                    self._following = None

    async def _follow(self, begun: asyncio.Future[None]) -> None:
        """Read new lines while anybody watches."""
        try:
            self._last = self._before_tail = await self.newest()
            begun.set_result(None)
        except StoreError as error:
            begun.set_exception(error)
            self._following = None  # the next watcher tries again
            return
        while True:
            await self._written.wait()
            self._written.clear()
            try:
                await self._read()
            except StoreTakenOver:
                return  # the coordinator ends
            except StoreError:
                self._written.set()
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(PAUSE_S)

    async def _read(self) -> None:
        while True:
            lines = await self._do(self._store.history_between, "", (self._last + 1, _LARGEST), AT_ONCE)
            if lines:
                self._tail.extend(Line(*line) for line in lines)
                self._last = lines[-1][0]
                while len(self._tail) > TAIL:
                    self._before_tail = self._tail.popleft().number
                self._news.set()
                self._news = asyncio.Event()
            if len(lines) < AT_ONCE:
                return
