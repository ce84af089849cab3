"""The store, called from the event loop: every call goes through one thread, in order, and never holds the loop up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from fl_server.store.base import Store

P = ParamSpec("P")
R = TypeVar("R")


class Ledger:
    """A Store behind a thread of its own: `await ledger.do(ledger.store.clients)`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    async def do(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a method of the store in its thread. A caller that is cancelled does not undo what was begun."""
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._thread, lambda: method(*args, **kwargs)))

    def close(self) -> None:
        """Finish what is queued and close the store."""
        self._thread.submit(self.store.close)
        self._thread.shutdown(wait=True)
