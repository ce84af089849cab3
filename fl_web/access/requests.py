"""Checks of a request before anything reads it, and the headers of every response.

The Host header must name this page, so that a name of another site that points here opens nothing (DNS rebinding). A
request that another site's page makes is refused, except a plain link to a page. A form must come from the page itself.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]


def host_port(address: Any) -> str:
    """A socket's address as text; of IPv6 with brackets."""
    host, port = str(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def answer(send: Send, status: int, text: str, headers: Headers = ()) -> None:
    """Send a whole response."""
    body = text.encode()
    own = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})


FAILURES, FAILURES_S = 10, 60.0
"""Failed logins of one caller, and the time in which so many are allowed."""
CALLERS = 4096
"""The most callers that are remembered."""
STREAMS_PER_SESSION, STREAMS = 100, 500
"""Open event streams of one browser, and of all."""


class FailedLogins:
    """Counts failed logins by caller: an address or a certificate. Known secrets are not asked to wait."""

    def __init__(self) -> None:
        self._failed: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Begin of the time, by the monotonic clock, and failures in it, by caller."""

    def wait_s(self, caller: str) -> float:
        """Seconds that a caller has to wait; 0: it may try."""
        began, count = self._failed.get(caller, (0.0, 0))
        return max(0.0, began + FAILURES_S - time.monotonic()) if count >= FAILURES else 0.0

    def add(self, caller: str) -> None:
        """A login of a caller failed."""
        now = time.monotonic()
        began, count = self._failed.pop(caller, (now, 0))
        self._failed[caller] = (now, 1) if now - began >= FAILURES_S else (began, count + 1)
        if len(self._failed) > CALLERS:
            self._failed.popitem(last=False)


class TooManyStreams(Exception):
    """One more event stream would be over a limit."""


class OpenStreams:
    """Counts open event streams."""

    def __init__(self, per_session: int = STREAMS_PER_SESSION, in_all: int = STREAMS) -> None:
        self._per_session, self._in_all = per_session, in_all
        self._open: Counter[str] = Counter()

    @contextmanager
    def opened(self, session: str) -> Iterator[None]:
        """A stream of a session. Raises TooManyStreams."""
        if self._open.total() >= self._in_all:
            raise TooManyStreams(f"{self._in_all} pages are open, which is the limit of this process")
        if self._open[session] >= self._per_session:
            raise TooManyStreams(f"this browser has {self._per_session} pages open, which is the limit")
        self._open[session] += 1
        try:
            yield
        finally:
            self._open[session] -= 1
            if not self._open[session]:
                del self._open[session]


POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    # Not no-referrer: with it a browser sends "Origin: null" with a form of the page itself.
    b"referrer-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
}
_PRIVATE = (b"cache-control", b"no-store")
"""The header of a response that has no other rule: what a browser was shown is of its identity."""
_ONCE = ("host", "origin", "content-length", "sec-fetch-site", "sec-fetch-mode")
OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")
LOGIN, LOGOUT = "/login", "/logout"
"""Addresses that change a session. A GET shows a form, whose POST makes the change: a link alone changes nothing."""
MOST_PATH, MOST_QUERY = 1024, 8192
"""The longest address, in bytes."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The page's own addresses."""

    scheme: str
    """"http" or "https"."""
    hosts: Collection[str]
    """Names without a port, in small letters."""

    def has_host(self, host: str) -> bool:
        """Whether a Host header names this page."""
        return _name(host) in self.hosts

    def is_own(self, origin: str, host: str) -> bool:
        """Whether an Origin header is that of the request's own page."""
        return origin.lower() == f"{self.scheme}://{host}".lower()


class CheckedRequests:
    """ASGI application: refuses what no browser of ours sends, and adds headers to every response."""

    def __init__(self, app: Application, origin: Origin) -> None:
        self._app, self._origin = app, origin

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return  # uvicorn has neither web sockets nor lifespan here

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = list(_with_policy(message.get("headers", ())))
            await send(message)

        if (refusal := self._refusal(scope)) is not None:
            await answer(with_headers, *refusal)
            return
        await self._app(scope, receive, with_headers)

    def _refusal(self, scope: Message) -> tuple[int, str] | None:
        headers, path = headers_of(scope), scope["path"]
        if any(len(headers.get(name, ())) > 1 for name in _ONCE):
            return 400, "A header is there twice.\n"
        host = headers.get("host", [""])[0]
        if not self._origin.has_host(host):
            own = ", ".join(sorted(self._origin.hosts))
            return 421, f"This page is not served as {host[:200]!r}: expected one of {own} (web_address names it).\n"
        if len(scope.get("raw_path") or path.encode()) > MOST_PATH or len(scope["query_string"]) > MOST_QUERY:
            return 414, "The address is too long.\n"
        if scope["method"] not in {"GET", "HEAD"} and not _is_form(scope):
            return 405, "This page is read only: expected GET or HEAD.\n"
        if self._is_foreign(scope, headers, host):
            return 403, "The request comes from the page of another site.\n"
        return None

    def _is_foreign(self, scope: Message, headers: Mapping[str, list[str]], host: str) -> bool:
        """Whether a page of another site makes the request. Its plain links may lead here."""
        origin, site = headers.get("origin", [None])[0], headers.get("sec-fetch-site", [""])[0]
        if origin is not None and not self._origin.is_own(origin, host):
            return True
        is_link = headers.get("sec-fetch-mode", [""])[0] == "navigate" and scope["method"] == "GET"
        if site in {"cross-site", "same-site"} and not is_link:
            return True
        return _is_form(scope) and origin is None and site != "same-origin"


def _is_form(scope: Message) -> bool:
    return scope["method"] == "POST" and scope["path"] in {LOGIN, LOGOUT}


def headers_of(scope: Message) -> Mapping[str, list[str]]:
    """The headers of a request by name in small letters."""
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return headers


def _with_policy(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, bytes]]:
    given = [(bytes(name).lower(), bytes(value)) for name, value in headers]
    names = {name for name, _ in given}
    yield from ((name, value) for name, value in given if name not in HEADERS)
    yield from HEADERS.items()
    if _PRIVATE[0] not in names:
        yield _PRIVATE


def _name(host: str) -> str:
    """A Host header without its port."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() else host.lower()
