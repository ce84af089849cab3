"""The store, called from the event loop: every call goes through one thread, in order, and never holds the loop up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import ParamSpec, TypeVar

from fl_server.store.base import ClientRecord, HistoryRecord, Store, StoreFull, StoreTaken

P = ParamSpec("P")
R = TypeVar("R")


NO_ROOM_S = 2.0
"""Wait between attempts at writing to a full disk."""


async def until_room(no_room: Callable[[str], None], write: Callable[[], Awaitable[R]]) -> R:
    """Try until the disk has room and the database is there. Nothing is lost: what was written before stays.

    no_room: told why at each failure, and "" once it has worked after all.
    """
    failed = False
    while True:
        try:
            written = await write()
        except StoreFull as error:
            failed = True
            no_room(str(error))
            await asyncio.sleep(NO_ROOM_S)
        else:
            if failed:
                no_room("")
            return written


MOST_CLIENTS = 1000
"""Written in one transaction: others have to get their turn, and a statement has so many values at most."""
GATHER_S = 0.05
"""From the last transaction with clients to the next, for one transaction costs as much as twenty more clients in it.
A client that comes alone waits for nobody, and calls are not held up: what was gathered goes before them."""


class _ClientGroup:
    """Clients that are written in one transaction, as long as it has not begun."""

    def __init__(self) -> None:
        self.written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queued = False
        self._clients: list[ClientRecord] = []
        self._whys: list[HistoryRecord] = []
        self._closed = False
        self._lock = Lock()

    def add(self, client: ClientRecord, why: HistoryRecord | None) -> bool:
        """False: it is too late for this group."""
        with self._lock:
            if self._closed or len(self._clients) >= MOST_CLIENTS:
                return False
            self._clients.append(client)
            self._whys.extend([] if why is None else [why])
            return True

    def write(self, store: Store) -> None:
        """In the ledger's thread."""
        with self._lock:
            self._closed = True
        store.put_clients(self._clients, self._whys)

    def answer(self, writing: asyncio.Future[None]) -> None:
        """Tell all that wait what came of it."""
        if self.written.cancelled():
            return
        if writing.cancelled():
            self.written.cancel()
        elif error := writing.exception():
            self.written.set_exception(error)
        else:
            self.written.set_result(None)


class Ledger:
    """A Store behind a thread of its own: `await ledger.do(ledger.store.clients)`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.taken: StoreTaken | None = None
        """Set when another coordinator has the ledger: this one can only end."""
        self.on_taken: Callable[[], None] = lambda: None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._group: _ClientGroup | None = None
        """The last that came, if that was clients; it is queued, or will be in a moment."""
        self._gathered = -math.inf
        """When a group was queued."""

    async def do(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a method of the store in its thread. A caller that is cancelled does not undo what was begun."""
        self._queue_group()
        return await self._answer(self._queue(lambda: method(*args, **kwargs)))

    async def put_client(self, client: ClientRecord, why: HistoryRecord | None) -> None:
        """Write a client down; those that come within GATHER_S, or while the thread is busy, go into one transaction.

        They fail together, too. What is queued with `do` in between stays in between.
        """
        group = self._group
        if group is None or not group.add(client, why):
            self._queue_group()
            group = self._group = _ClientGroup()
            group.add(client, why)
            asyncio.get_running_loop().call_at(self._gathered + GATHER_S, self._queue_if_latest, group)
        await self._answer(group.written)

    def _queue_if_latest(self, group: _ClientGroup) -> None:
        """The group's time has come, unless it was queued before."""
        if group is self._group and not group.queued:
            group.queued, self._gathered = True, asyncio.get_running_loop().time()
            self._queue(partial(group.write, self.store)).add_done_callback(group.answer)

    def _queue_group(self) -> None:
        """Nobody joins the latest group any more."""
        if self._group is not None:
            self._queue_if_latest(self._group)
        self._group = None

    def _queue(self, work: Callable[[], R]) -> asyncio.Future[R]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _answer(self, queued: asyncio.Future[R]) -> R:
        try:
            return await asyncio.shield(queued)
        except StoreTaken as error:
            self.taken = error
            self.on_taken()
            raise

    async def insist(
        self, no_room: Callable[[str], None], method: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """`do`, tried again while the disk is full or the database away; `no_room` is told of each failure."""
        return await until_room(no_room, lambda: self.do(method, *args, **kwargs))

    def close(self) -> None:
        """Finish what came and close the store."""
        self._queue_group()
        self._thread.submit(self.store.close)
        self._thread.shutdown(wait=True)
