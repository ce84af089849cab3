"""Where browsers get their identity from. Each kind of serving has one of these.

- `Everybody`: there are no identities; every browser has the same Reader.
- `OneOperator`: the process has the identity of an operator (`fl web`); a login link of this process lets a browser in.
- `Coordinator`: the coordinator keeps the sessions (`web_listen`); this process only passes their secrets on.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import grpc
import grpc.aio

from fl_common.own_secrets import is_own
from fl_web.coordinator.calls import WebError
from fl_web.coordinator.reader import Reader
from protos.fl.v1 import web_pb2, web_pb2_grpc
from protos.wire import BROWSER_ADDRESS

SESSION_S = 8 * 3600.0
MOST_READERS = 256
"""The most readers of sessions; the one that was used longest ago is closed, and made again when it is needed."""
MOST_ENDED = 4096
"""Secrets that the coordinator did not know any more; it is not asked for these again."""
MOST_SECRET = 100
"""Characters; longer texts are no secret."""
_CALL_S = 10.0

browser_address: ContextVar[str] = ContextVar("browser_address", default="")
"""host:port of the browser whose request is answered. The coordinator records it."""


@dataclass(frozen=True, slots=True)
class Session:
    """A new session of a browser."""

    secret: str
    seconds: float
    """Seconds until its end at the latest."""


class Identities(ABC):
    """Gives browsers an identity. By itself it gives out no secret and no link."""

    needs_login = True

    def is_own(self, secret: str) -> bool:
        """Whether a session's secret or a link's code was given out here, ended or not. Others are made up."""
        del secret
        return False

    @abstractmethod
    async def reader(self, secret: str) -> Reader | None:
        """The Reader of a session; None for a session that is unknown or has ended."""

    async def holder_of_link(self, code: str) -> str:
        """The operator whose login link a code is of: "operator:alice". Empty for one that `open_by_code` refuses."""
        del code
        return ""

    async def open_by_code(self, code: str) -> Session | None:
        """A session for the code of a login link; None for a code that is unknown, used or too old."""
        del code
        return None

    async def open_by_certificate(self, certificate: bytes) -> Session | None:
        """A session for a client certificate (DER) that TLS has verified; None if it opens none."""
        del certificate
        return None

    async def close_session(self, secret: str) -> None:
        """End a session."""
        del secret

    async def forget(self, secret: str) -> None:
        """Drop the Reader of a session that the coordinator does not know any more."""
        del secret

    @abstractmethod
    async def close(self) -> None:
        """Close all Readers."""


class Everybody(Identities):
    """One Reader for all, without a login."""

    needs_login = False

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def reader(self, secret: str) -> Reader | None:
        """The one Reader."""
        del secret
        return self._reader

    async def close(self) -> None:
        """Close the Reader."""
        await self._reader.close()


class OneOperator(Identities):
    """The Reader of this process for the browsers that have used its login link, which is good for one use."""

    def __init__(self, reader: Reader, session_s: float = SESSION_S) -> None:
        self._reader, self._session_s = reader, session_s
        self._code = secrets.token_urlsafe(32)
        self._sessions: dict[str, float] = {}
        """End by the monotonic clock, by the hash of the secret."""

    @property
    def code(self) -> str:
        """The link's code; empty once it was used."""
        return self._code

    def is_own(self, secret: str) -> bool:
        """Whether it is the link's code, or a session."""
        return _hash(secret) in self._sessions or (bool(self._code) and _equal(secret, self._code))

    async def reader(self, secret: str) -> Reader | None:
        """The one Reader, for a session that has not ended."""
        return self._reader if time.monotonic() < self._sessions.get(_hash(secret), 0.0) else None

    async def holder_of_link(self, code: str) -> str:
        """The operator of this process."""
        if not self._code or not _equal(code, self._code):
            return ""
        try:
            return (await self._reader.who_am_i()).identity
        except WebError:
            return "the operator who started `fl web`"

    async def open_by_code(self, code: str) -> Session | None:
        """A session for the link's code, once."""
        if not self._code or not _equal(code, self._code):
            return None
        self._code, secret = "", secrets.token_urlsafe(32)
        self._sessions[_hash(secret)] = time.monotonic() + self._session_s
        return Session(secret, self._session_s)

    async def close_session(self, secret: str) -> None:
        """End a session."""
        self._sessions.pop(_hash(secret), None)

    async def close(self) -> None:
        """Close the Reader."""
        await self._reader.close()


class Coordinator(Identities):
    """The coordinator's sessions. This process keeps Readers, which have no more power than the secrets in them."""

    def __init__(self, channel: grpc.aio.Channel, key: bytes) -> None:
        """channel: to the coordinator's socket for this process. key: of its secrets (`own_secrets`)."""
        self._channel, self._key = channel, key
        self._login: Any = cast(Any, web_pb2_grpc).WebLoginStub(channel)
        self._readers: OrderedDict[str, Reader] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        """Hashes of secrets that open nothing any more."""

    def is_own(self, secret: str) -> bool:
        """Whether the coordinator has made it."""
        return is_own(self._key, secret)

    async def reader(self, secret: str) -> Reader | None:
        """The Reader of a session. The first time, the coordinator is asked whether the session is known."""
        key = _hash(secret)
        if key in self._ended:
            return None
        if (known := self._readers.get(key)) is not None:
            self._readers.move_to_end(key)
            return known
        reader = Reader(self._channel, lambda: (("authorization", f"Bearer {secret}"), *_address()))
        try:
            await reader.who_am_i()
        except grpc.aio.AioRpcError as error:
            await reader.close()
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                self._has_ended(key)
                return None
            raise
        self._readers[key] = reader
        while len(self._readers) > MOST_READERS:
            await self._readers.popitem(last=False)[1].close()
        return reader

    async def holder_of_link(self, code: str) -> str:
        """The holder as the coordinator names it. It is not asked about codes that it did not make."""
        if not self.is_own(code):
            return ""
        try:
            link = await self._login.GetLink(web_pb2.GetLinkRequest(code=code), timeout=_CALL_S, metadata=_address())
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return ""
            raise
        return str(link.identity)

    async def open_by_code(self, code: str) -> Session | None:
        """A session for a link's code."""
        if (key := _hash(code)) in self._ended:
            return None
        session = await self._opened("OpenByCode", web_pb2.OpenByCodeRequest(code=code))
        self._has_ended(key)
        return session

    async def open_by_certificate(self, certificate: bytes) -> Session | None:
        """A session for a certificate."""
        return await self._opened("OpenByCertificate", web_pb2.OpenByCertificateRequest(certificate=certificate))

    async def _opened(self, method: str, request: Any) -> Session | None:
        try:
            session = (await getattr(self._login, method)(request, timeout=_CALL_S, metadata=_address())).session
        except grpc.aio.AioRpcError as error:
            if error.code() in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}:
                return None
            raise
        return Session(session.secret, max(0.0, session.ends.ToSeconds() - time.time()))

    async def close_session(self, secret: str) -> None:
        """End a session."""
        await self.forget(secret)
        request = web_pb2.CloseSessionRequest(secret=secret)
        await self._login.CloseSession(request, timeout=_CALL_S, metadata=_address())

    async def forget(self, secret: str) -> None:
        """Drop the Reader of a session that has ended."""
        self._has_ended(_hash(secret))
        if (reader := self._readers.pop(_hash(secret), None)) is not None:
            await reader.close()

    async def close(self) -> None:
        """Close all Readers."""
        while self._readers:
            await self._readers.popitem()[1].close()

    def _has_ended(self, key: str) -> None:
        self._ended[key] = None
        while len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)


def _address() -> tuple[tuple[str, str], ...]:
    return ((BROWSER_ADDRESS, browser_address.get()),)


def _equal(first: str, second: str) -> bool:
    return hmac.compare_digest(first.encode(errors="surrogatepass"), second.encode(errors="surrogatepass"))


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()
