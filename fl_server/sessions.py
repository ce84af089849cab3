"""Sessions of clients, and the stream on which each is pushed its work."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from fl_server.errors import Fenced, UnknownSessionError
from fl_server.identity import address, caller
from protos.fl.v1.coordinator_pb2 import AttendResponse

UNREAD_S = 30.0
"""An Attend stream with too much waiting is ended when nothing was read from it for so long."""


class Stream:
    """One Attend stream: what is still to be pushed, until it is ended."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[AttendResponse | Exception | None] = asyncio.Queue()
        self._waits_since: float | None = None
        """When the reader was given the message that it has not taken yet."""
        self.closed = asyncio.Event()
        """Set when nobody reads it any more, whoever ended it."""

    def push(self, message: AttendResponse) -> None:
        """Send a message when the stream gets to it."""
        self._queue.put_nowait(message)

    def unread(self, most: int) -> bool:
        """Whether more messages wait than `most`, and the reader has taken none for long."""
        waits_since = self._waits_since
        too_many = self._queue.qsize() > most
        return too_many and waits_since is not None and time.monotonic() >= waits_since + UNREAD_S

    def drop(self, error: Exception) -> None:
        """End the stream with an error in place of all that waits."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self.end(error)

    def end(self, error: Exception | None = None) -> None:
        """End the stream behind what was pushed before, with an error if there is one."""
        self._queue.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[AttendResponse]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            self._waits_since = time.monotonic()
            yield item
            self._waits_since = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a registration came from: the daemon's process, its address, and its certificate if there is one."""

    instance_id: str
    address: str = ""
    serial: str = ""
    """Of the certificate, in hex; empty without one."""
    ends: float | None = None
    """When the certificate ends, in Unix seconds."""
    at: float = field(default_factory=time.time)
    """When it came, in Unix seconds."""


def origin_of_call(instance_id: str) -> Origin:
    """The origin of the registration that is being served."""
    who = caller.get()
    return Origin(instance_id, address.get(), who.serial, who.ends)


@dataclass(slots=True)
class Session:
    """One registration of one client."""

    client_id: str
    instance_id: str
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    stream: Stream | None = None
    origin: Origin = Origin("")


class Sessions:
    """The open sessions: at most one for each client; a newer one fences the older."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_client: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, client_id: str, origin: Origin) -> tuple[Session, Session | None]:
        """A new session, and the older one of the client that it fenced, if there was one."""
        instance_id = origin.instance_id
        older = self._by_client.get(client_id)
        if older is not None:
            self._by_id.pop(older.id)
            if older.stream is not None:
                older.stream.end(Fenced(client_id, older.instance_id != instance_id))
        session = Session(client_id, instance_id, origin=origin)
        self._by_id[session.id] = self._by_client[client_id] = session
        return session, older

    def get(self, session_id: str) -> Session:
        """The session. Raises UnknownSessionError."""
        session = self._by_id.get(session_id)
        if session is None:
            raise UnknownSessionError
        return session

    def of(self, client_id: str) -> Session | None:
        """The client's open session."""
        return self._by_client.get(client_id)

    def close(self, client_id: str, error: Exception) -> None:
        """End the client's session with an error, if it has one."""
        session = self._by_client.pop(client_id, None)
        if session is not None:
            self._by_id.pop(session.id, None)
            if session.stream is not None:
                session.stream.end(error)

    def push(self, client_id: str, message: AttendResponse) -> bool:
        """Push to the client if it is attached; what it misses it is told when it attaches again."""
        session = self._by_client.get(client_id)
        if session is None or session.stream is None:
            return False
        session.stream.push(message)
        return True

    def push_all(self, message: AttendResponse) -> None:
        """Push to every attached client."""
        for client_id in self._by_client:
            self.push(client_id, message)
