"""Calls the store from the event loop: all calls run in one thread, in order, and never block the loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import ParamSpec, TypeVar

from fl_server.store.database.store import Store
from fl_server.store.errors import StoreFull, StoreTakenOver
from fl_server.store.history_feed import HistoryFeed
from fl_server.store.records import ClientRecord, HistoryRecord

P = ParamSpec("P")
R = TypeVar("R")


RETRY_S = 2.0
"""Wait between attempts to write to a full disk."""


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


MOST_CLIENTS = 1000
"""Clients in one transaction: other calls need their turn, and the number of values in a statement is limited."""
GATHER_S = 0.05
"""Shortest time between two transactions with clients: one transaction costs as much as twenty more clients in it.
A single registration is written at once. Other calls do not wait: gathered clients are written before them."""


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
        self.history = HistoryFeed(store, self.do)
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
            return await asyncio.shield(queued)
        except StoreTakenOver as error:
            self.taken = error
            self.on_taken()
            raise

    def close(self) -> None:
        """Finish all queued calls and close the store."""
        self._queue_group()
        self._thread.submit(self.store.close)
        self._thread.shutdown(wait=True)
