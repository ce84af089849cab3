"""The uploads and downloads that are open, by client: what ends a client ends them too, at once and in words."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Transfer:
    """One open stream of a client. Lives on the event loop, in the task of its call."""

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self._ended: Exception | None = None
        self._waiting: asyncio.Task[Any] | None = None

    def end(self, error: Exception) -> None:
        """Nothing more is taken or sent; whoever does it gets the error."""
        self._ended = error
        if self._waiting is not None:
            self._waiting.cancel()

    def check(self) -> None:
        """Raises what it was ended with."""
        if self._ended is not None:
            raise self._ended

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """Do what may wait for the client for long. Raises what the transfer is ended with, as soon as it is."""
        self._waiting = asyncio.create_task(work)
        if self._ended is not None:
            self._waiting.cancel()
        try:
            return await self._waiting
        except BaseException:
            self.check()  # before what it came to in ending
            raise
        finally:
            self._waiting = None


class Transfers:
    """All that are open."""

    def __init__(self) -> None:
        self._open: dict[str, set[Transfer]] = {}

    @contextmanager
    def open(self, client_id: str) -> Iterator[Transfer]:
        """A transfer of the client, for as long as the block lasts."""
        transfer = Transfer(client_id)
        self._open.setdefault(client_id, set()).add(transfer)
        try:
            yield transfer
        finally:
            self._open[client_id].discard(transfer)
            if not self._open[client_id]:
                del self._open[client_id]

    def end(self, client_id: str, error: Exception) -> None:
        """End all transfers of a client with an error."""
        for transfer in self._open.get(client_id, ()):
            transfer.end(error)
