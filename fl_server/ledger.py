"""The store, called from the event loop: every call goes through one thread, in order, and never holds the loop up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from fl_server.store.base import Store, StoreFull, StoreTaken

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


class Ledger:
    """A Store behind a thread of its own: `await ledger.do(ledger.store.clients)`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.taken: StoreTaken | None = None
        """Set when another coordinator has the ledger: this one can only end."""
        self.on_taken: Callable[[], None] = lambda: None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    async def do(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a method of the store in its thread. A caller that is cancelled does not undo what was begun."""
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.shield(loop.run_in_executor(self._thread, lambda: method(*args, **kwargs)))
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
        """Finish what is queued and close the store."""
        self._thread.submit(self.store.close)
        self._thread.shutdown(wait=True)
