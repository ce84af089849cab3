"""Calls the store from the event loop: all calls run in one thread, in order, and never block the loop.

Whoever watches the history gets its new lines here.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from threading import Lock
from typing import Any, ParamSpec, TypeVar

from fl_common.waiting import shielded
from fl_server.store.database.store import Store
from fl_server.store.errors import StoreError, StoreFull, StoreTakenOver
from fl_server.store.records import ClientRecord, HistoryRecord

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

TAIL = 2000
"""Newest lines in memory while anybody watches."""
AT_ONCE = 250
"""Lines in one read, and in one batch for a watcher."""
PAUSE_S = 0.1
"""Least time between two reads: what thousands of clients cause in it becomes one."""
RETRY_S = 2.0
"""Wait after a read or a write that failed."""
MOST_CLIENTS = 1000
"""Clients in one transaction: other calls need their turn, and the number of values in a statement is limited."""
GATHER_S = 0.05
"""Shortest time between two transactions with clients: one transaction costs as much as twenty more clients in it.
A single registration is written at once. Other calls do not wait: gathered clients are written before them."""


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
    """Lines for one watcher, in order of number."""

    lines: list[Line]
    last: int
    """There are no other lines up to this number."""


class HistoryFeed:
    """The watchers of a ledger's history: a new line is read from the ledger once, however many watch.

    A watcher that has fallen behind, or begins with an older line, reads the lines that it lacks by itself, so that
    none makes another one wait, and nothing is queued for a slow one. Lives on the event loop.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.watchers = 0
        """How many watch now."""
        self._following: asyncio.Task[None] | None = None
        self._written, self._news = asyncio.Event(), asyncio.Event()
        """Set by the store: there are new lines; and set for watchers, once each: they were read."""
        self._tail: deque[Line] = deque()
        self._before_tail = self._last = 0
        """Every line with a number over the first one and up to the second one is in the tail."""
        self._begun: asyncio.Future[None]
        """Set while anybody watches: done when the newest line is known."""

    async def newest(self) -> int:
        """The number of the newest line; 0: there is none."""
        span = await self._ledger.do(self._ledger.store.history_span, "", 1)
        return max(span[1], 0)

    async def after(self, number: int | None, subject: str = "") -> AsyncGenerator[Batch, None]:
        """Yields the lines after a number, then new ones for as long as this is read. The first batch comes at once.

        Args:
            number: one above the newest line's counts as that; None: only lines from now on.
            subject: only lines about it; "" for all.
        """
        with self._watching() as begun:
            await shielded(begun)
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
            entries = await self._ledger.do(self._ledger.store.history_between, subject, (position + 1, last), AT_ONCE)
            return Batch([Line(*row) for row in entries], entries[-1][0] if len(entries) == AT_ONCE else last)
        lines = list(takewhile(lambda line: line.number > position, reversed(self._tail)))
        lines = lines[: -AT_ONCE - 1 : -1]
        last = lines[-1].number if len(lines) == AT_ONCE else last
        return Batch([line for line in lines if not subject or line.record.subject == subject], last)

    @contextmanager
    def _watching(self) -> Iterator[asyncio.Future[None]]:
        """A watcher. The future is done when the newest line is known."""
        self.watchers += 1
        if self._following is None:
            loop = asyncio.get_running_loop()
            self._begun, self._written = loop.create_future(), asyncio.Event()
            self._ledger.store.after_history(lambda: loop.call_soon_threadsafe(self._written.set))
            self._following = asyncio.create_task(self._follow(self._begun))
        try:
            yield self._begun
        finally:
            self.watchers -= 1
            if not self.watchers:
                self._ledger.store.after_history(None)
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
            lines = await self._ledger.do(self._ledger.store.history_between, "", (self._last + 1, 2**63 - 1), AT_ONCE)
            if lines:
                self._tail.extend(Line(*line) for line in lines)
                self._last = lines[-1][0]
                while len(self._tail) > TAIL:
                    self._before_tail = self._tail.popleft().number
                self._news.set()
                self._news = asyncio.Event()
            if len(lines) < AT_ONCE:
                return


async def write_when_possible(cannot_write: Callable[[str], None], write: Callable[[], Awaitable[R]]) -> R:
    """Retry a write while the disk is full or the database is unavailable. Everything written before stays.

    cannot_write: called with the reason after each failure, and with "" when a later attempt succeeds.
    """
    failed = False
    while True:
        try:
            written = await write()
        except StoreFull as error:
            failed = True
            cannot_write(str(error))
            await asyncio.sleep(RETRY_S)
        else:
            if failed:
                cannot_write("")
            return written


class _ClientGroup:
    """Clients of one transaction that has not begun."""

    def __init__(self) -> None:
        self.written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queued = False
        self._clients: list[ClientRecord] = []
        self._whys: list[HistoryRecord] = []
        self._closed = False
        self._lock = Lock()

    def add(self, client: ClientRecord, why: HistoryRecord | None) -> bool:
        """Add a client. Returns False if the group is closed or full."""
        with self._lock:
            if self._closed or len(self._clients) >= MOST_CLIENTS:
                return False
            self._clients.append(client)
            self._whys.extend([] if why is None else [why])
            return True

    def write(self, store: Store) -> None:
        """Write the group; in the ledger's thread."""
        with self._lock:
            self._closed = True
        store.put_clients(self._clients, self._whys)

    def resolve(self, writing: asyncio.Future[None]) -> None:
        """Pass the result of the transaction to all waiting callers."""
        if self.written.cancelled():
            return
        if writing.cancelled():
            self.written.cancel()
        elif error := writing.exception():
            self.written.set_exception(error)
        else:
            self.written.set_result(None)


class Ledger:
    """A Store with a thread of its own: `await ledger.do(ledger.store.clients)`."""

    def __init__(self, store: Store, thread: Executor | None = None) -> None:
        """thread: runs one call after the other; None: a thread of its own."""
        self.store = store
        self.history = HistoryFeed(self)
        self.taken: StoreTakenOver | None = None
        """Set when another coordinator has opened the ledger: this one must end."""
        self.on_taken: Callable[[], None] = lambda: None
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._group: _ClientGroup | None = None
        """The newest group, unless another call came after it."""
        self._gathered = -math.inf
        """Time of the last queued group."""

    async def do(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a method of the store in its thread. Cancelling the caller does not stop a call that has begun."""
        self._queue_group()
        return await self._result(self._queue(lambda: method(*args, **kwargs)))

    def call(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a method of the store in its thread, for a caller in another thread, which waits."""
        return self._thread.submit(method, *args, **kwargs).result()

    async def put_client(self, client: ClientRecord, why: HistoryRecord | None) -> None:
        """Write a client. Clients that come within GATHER_S, or while the thread is busy, share one transaction.

        They also fail together. The order relative to calls of `do` stays.
        """
        group = self._group
        if group is None or not group.add(client, why):
            self._queue_group()
            group = self._group = _ClientGroup()
            group.add(client, why)
            asyncio.get_running_loop().call_at(self._gathered + GATHER_S, self._queue_if_latest, group)
        await self._result(group.written)

    def _queue_if_latest(self, group: _ClientGroup) -> None:
        """Queue the group when its time is over, unless it was queued before."""
        if group is self._group and not group.queued:
            group.queued, self._gathered = True, asyncio.get_running_loop().time()
            self._queue(partial(group.write, self.store)).add_done_callback(group.resolve)

    def _queue_group(self) -> None:
        """Close the newest group: later clients go into another one."""
        if self._group is not None:
            self._queue_if_latest(self._group)
        self._group = None

    def _queue(self, work: Callable[[], R]) -> asyncio.Future[R]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _result(self, queued: asyncio.Future[R]) -> R:
        try:
            return await shielded(queued)
        except StoreTakenOver as error:
            self.take_away(error)
            raise

    def take_away(self, error: StoreTakenOver) -> None:
        """Another coordinator leads."""
        self.taken = self.taken or error
        self.on_taken()

    def close(self) -> None:
        """Finish all queued calls and close the store."""
        self._queue_group()
        self._thread.submit(self.store.close)
        self._thread.shutdown(wait=True)
