"""The sessions of clients: the stream on which messages are pushed to each, and the transfers in them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from fl_server.errors import Fenced, InvalidInput, UnknownSessionError
from fl_server.identity import address, caller, require_name
from protos.fl.v1.coordinator_pb2 import AttendRequest, AttendResponse, RegisterRequest

T = TypeVar("T")
Asked: TypeAlias = RegisterRequest | AttendRequest
"""A call by which a client asks what has become of its updates (`pending`) and runs (`states`)."""
MOST_SENT = 32
"""Digests of a session that are kept; an assignment has fewer resources."""
MOST_ASKED = 1000
"""Updates, and states, that a client may ask about in one call."""
MOST_AUTHORITIES = 12
"""Authorities that a client may name when it attends."""
_SHA256_BYTES = 32
UNREAD_S = 30.0
"""An Attend stream with too many waiting messages is ended after this time without a read."""


class Stream:
    """One Attend stream: a queue of messages until it is ended."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[AttendResponse | Exception | None] = asyncio.Queue()
        self._unread_since: float | None = None
        """When the message that the reader has not taken yet was given to it."""
        self.closed = asyncio.Event()
        """Set when the stream is no longer read."""

    def push(self, message: AttendResponse) -> None:
        """Queue a message."""
        self._queue.put_nowait(message)

    def unread(self, most: int) -> bool:
        """Whether more than `most` messages wait, and the reader has taken none for UNREAD_S."""
        since = self._unread_since
        too_many = self._queue.qsize() > most
        return too_many and since is not None and time.monotonic() >= since + UNREAD_S

    def drop(self, error: Exception) -> None:
        """Drop the waiting messages and end the stream with an error."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self.end(error)

    def end(self, error: Exception | None = None) -> None:
        """End the stream after the waiting messages, with an error if there is one."""
        self._queue.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[AttendResponse]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            self._unread_since = time.monotonic()
            yield item
            self._unread_since = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a registration came from: the daemon's process, its address, and its certificate if there is one."""

    instance_id: str
    address: str = ""
    serial: str = ""
    """The certificate's serial number in hex; empty without one."""
    ends: float | None = None
    """When the certificate ends, in Unix seconds."""
    at: float = field(default_factory=time.time)
    """When it registered, in Unix seconds."""


def origin_of_call(instance_id: str) -> Origin:
    """The origin of the current call."""
    who = caller.get()
    return Origin(instance_id, address.get(), who.serial, who.ends)


def shown_certificate(request: AttendRequest) -> dict[str, Any] | None:
    """The certificate of the current call, as `ClientRecord` has it; None without one.

    Raises InvalidInput for authorities that are no digests, or too many.
    """
    authorities = request.authorities
    if len(authorities) > MOST_AUTHORITIES or any(len(digest) != _SHA256_BYTES for digest in authorities):
        raise InvalidInput("authorities", f"at most {MOST_AUTHORITIES} digests of 32 bytes", f"{len(authorities)}")
    who = caller.get()
    if not who.serial or who.ends is None:
        return None
    return {
        "serial": who.serial, "begins": who.begins, "ends": who.ends, "issuer": who.issuer,
        "authorities": [digest.hex() for digest in authorities],
    }  # fmt: skip


def check_questions(request: Asked) -> None:
    """Raises InvalidInput for a client that asks about too many updates or runs."""
    for name, asked in (("pending", request.pending), ("states", request.states)):
        if len(asked) > MOST_ASKED:
            raise InvalidInput(name, f"{MOST_ASKED} at most", f"{len(asked)}")


@dataclass(slots=True)
class Session:
    """One registration of one client."""

    client_id: str
    instance_id: str
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    stream: Stream | None = None
    origin: Origin = Origin("")
    closed: bool = False
    """Whether it was closed, or fenced by a newer one."""
    packages: frozenset[str] = frozenset()
    """Names of the packages for which the device has data."""
    package_refusals: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Rule and reason of each package that the device was offered and does not run, by digest."""
    releases: dict[str, int] | None = None
    """The version in use of each released model on the device, by name. None: its owner takes none."""
    sent: dict[bytes, None] = field(default_factory=dict)
    """Digests of the resources that the daemon's process held when it registered, or that went out to it completely,
    the newest last. For display only: a daemon keeps what its newest assignment needs, and fetches the rest again."""

    def resource_sent(self, digest: bytes) -> None:
        """A resource went out completely."""
        self.sent.pop(digest, None)
        self.sent[digest] = None
        if len(self.sent) > MOST_SENT:
            del self.sent[next(iter(self.sent))]


class Transfer:
    """One open stream of a client. Lives on the event loop, in the task of its call."""

    def __init__(self, session: Session) -> None:
        self.client_id, self._session = session.client_id, session
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
        if self._session.closed:
            raise UnknownSessionError

    def resource_sent(self, digest: bytes) -> None:
        """A resource went out completely in this stream."""
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


class Sessions:
    """The open sessions: at most one for each client; a newer one fences the older one. Each has its open transfers."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_client: dict[str, Session] = {}
        self._transfers: dict[str, set[Transfer]] = {}
        """The open transfers by client."""
        self._seen: dict[str, float] = {}
        """Unix time of each client's latest call or lost stream. In memory only: a call costs no write."""
        self.proven: dict[str, str] = {}
        """The instance of each client that had an update admitted last."""

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, client_id: str, origin: Origin) -> tuple[Session, Session | None]:
        """Open a session. Returns it, and the client's older session that it fenced, if there was one."""
        instance_id = origin.instance_id
        older = self._by_client.get(client_id)
        if older is not None:
            self._by_id.pop(older.id)
            older.closed = True
            if older.stream is not None:
                older.stream.end(Fenced(client_id, older.instance_id != instance_id))
        session = Session(client_id, instance_id, origin=origin)
        if older is not None and older.instance_id == instance_id:
            session.sent = older.sent
        self._by_id[session.id] = self._by_client[client_id] = session
        return session, older

    def get(self, session_id: str) -> Session:
        """An open session by its id. Raises UnknownSessionError."""
        session = self._by_id.get(session_id)
        if session is None:
            raise UnknownSessionError
        return session

    def of_call(self, session_id: str) -> Session:
        """The open session in which a call is made: a sign of life. Raises UnknownSessionError, Forbidden."""
        session = self.get(session_id)
        require_name(session.client_id)
        self.sign_of_life(session.client_id)
        return session

    def update_admitted(self, session_id: str) -> None:
        """An update was admitted in this session: its daemon is the one that works under the identity."""
        if (session := self._by_id.get(session_id)) is not None:  # else a newer session has fenced it
            self.proven[session.client_id] = session.instance_id

    def sign_of_life(self, client_id: str) -> None:
        """The client was there until now."""
        self._seen[client_id] = time.time()

    def last_sign(self, client_id: str) -> float | None:
        """Unix time of the client's latest call or lost stream; None without one since the coordinator's start."""
        return self._seen.get(client_id)

    @contextmanager
    def transfer(self, session_id: str) -> Iterator[Transfer]:
        """An upload or download in a session; a ban ends it. Raises UnknownSessionError, Forbidden."""
        session = self.of_call(session_id)
        transfer = Transfer(session)
        transfers = self._transfers.setdefault(session.client_id, set())
        transfers.add(transfer)
        try:
            yield transfer
        finally:
            transfers.discard(transfer)
            if not transfers and self._transfers.get(session.client_id) is transfers:
                del self._transfers[session.client_id]

    def of(self, client_id: str) -> Session | None:
        """The client's open session, attended or not."""
        return self._by_client.get(client_id)

    def close(self, client_id: str, error: Exception) -> None:
        """Close the client's session with an error, if it has one."""
        session = self._by_client.pop(client_id, None)
        if session is not None:
            self._by_id.pop(session.id, None)
            session.closed = True
            if session.stream is not None:
                session.stream.end(error)

    def end(self, client_id: str, error: Exception) -> None:
        """Close the client's session and end its transfers with an error."""
        self.close(client_id, error)
        for transfer in self._transfers.get(client_id, ()):
            transfer.end(error)

    def forget(self, client_id: str) -> None:
        """Drop all that is known of the client."""
        self._seen.pop(client_id, None)
        self.proven.pop(client_id, None)

    def push(self, client_id: str, message: AttendResponse) -> bool:
        """Push a message if the client is attached. False if it is not."""
        session = self._by_client.get(client_id)
        if session is None or session.stream is None:
            return False
        session.stream.push(message)
        return True

    def push_all(self, message: AttendResponse) -> None:
        """Push a message to every attached client."""
        for client_id in self._by_client:
            self.push(client_id, message)
