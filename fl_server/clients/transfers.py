"""The open uploads and downloads of each client, so that a ban can end them at once with its reason."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fl_server.clients.sessions import Session
from fl_server.errors import UnknownSessionError

T = TypeVar("T")


class Transfer:
    """One open stream of a client. Lives on the event loop, in the task of its call."""

    def __init__(self, client_id: str, session: Session | None = None) -> None:
        self.client_id, self._session = client_id, session
        self._ended: Exception | None = None
        self._waiting: asyncio.Task[Any] | None = None

    def end(self, error: Exception) -> None:
        """End the transfer: its call raises the error."""
        self._ended = error
        if self._waiting is not None:
            self._waiting.cancel()

    def check(self) -> None:
        """Raises the error with which the transfer was ended. A transfer ends with its session."""
        if self._ended is not None:
            raise self._ended
        if self._session is not None and self._session.closed:
            raise UnknownSessionError

    def resource_sent(self, digest: bytes) -> None:
        """A resource went out completely in this stream."""
        if self._session is not None:
            self._session.resource_sent(digest)

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that may wait long for the client. Raises the error of `end` as soon as that is called."""
        waiting = asyncio.create_task(work)
        self._waiting = waiting
        if self._ended is not None:
            waiting.cancel()
        try:
            return await waiting
        except BaseException:  # `end` cancels the work, so CancelledError is included
            self.check()  # rather than the error that the cancellation caused
            raise
        finally:
            self._waiting = None


class Transfers:
    """The open transfers of all clients."""

    def __init__(self) -> None:
        self._open: dict[str, set[Transfer]] = {}

    @contextmanager
    def open(self, client_id: str, session: Session | None = None) -> Iterator[Transfer]:
        """A transfer of the client, for as long as the block lasts."""
        transfer = Transfer(client_id, session)
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
