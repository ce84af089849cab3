"""Logins and cookies: gives each request the Reader of its browser, or shows what a login needs."""

from __future__ import annotations

import logging
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

import grpc
import grpc.aio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from fl_web.access.asgi import Application, Message, Receive, Send, answer
from fl_web.access.identities import MOST_SECRET, Identities, Session
from fl_web.access.limits import STREAMS, FailedLogins, OpenStreams, TooManyStreams
from fl_web.access.requests import LOGOUT, headers_of
from fl_web.coordinator.reader import Reader

log = logging.getLogger(__name__)

LOGIN, STREAM = "/login", "/live"
PUBLIC = ("/static/", "/healthz")
"""Addresses that need no login."""
PEER_CERTIFICATE = "peer_certificate"
"""In the state of a request's scope: the client certificate that TLS has verified (DER), or None."""
_ENDED = "access_session_ended"


class Sessions:
    """ASGI application: the page with its logins."""

    def __init__(self, app: Starlette, identities: Identities, how: str, *, secure: bool) -> None:
        """how: a person's way to a login link, as text. secure: whether the page is served with TLS."""
        app.add_exception_handler(grpc.aio.AioRpcError, _refused_call)
        self._app: Application = app
        self._identities, self._how, self._secure = identities, how, secure
        self._failed, self._unknown = FailedLogins(), FailedLogins()
        """Of links, and of cookies: a browser with an old cookie may still log in."""
        self._streams = OpenStreams() if identities.needs_login else OpenStreams(per_session=STREAMS)
        self._cookie = "__Host-impetus" if secure else "impetus"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        path, state = scope["path"], scope.setdefault("state", {})
        certificate, state["reader"] = state.pop(PEER_CERTIFICATE, None), None
        if path.startswith(PUBLIC):
            await self._app(scope, receive, send)
            return
        try:
            if path == LOGIN and self._identities.needs_login:
                await self._log_in(scope, send)
            elif path == LOGOUT:
                await self._log_out(scope, send)
            else:
                await self._page(scope, receive, send, certificate)
        except grpc.aio.AioRpcError as error:  # of a call for the session: the application has not answered yet
            log.warning("the coordinator does not answer: %s", error.code().name)
            await answer(send, 503, "The coordinator does not answer. Try again.\n", [(b"retry-after", b"3")])

    async def _page(self, scope: Message, receive: Receive, send: Send, certificate: bytes | None) -> None:
        secret, reader, new = await self._identified(scope, certificate)
        if reader is None:
            await self._needs_login(scope, send)
            return
        scope["state"]["reader"] = reader

        async def with_cookie(message: Message) -> None:
            if message["type"] == "http.response.start":
                if scope["state"].get(_ENDED):
                    await self._identities.forget(secret)
                    message["headers"] = [*message["headers"], self._set_cookie("", 0)]
                elif new is not None:
                    message["headers"] = [*message["headers"], self._set_cookie(new.secret, new.seconds)]
            await send(message)

        if scope["path"] != STREAM:
            await self._app(scope, receive, with_cookie)
            return
        try:
            with self._streams.opened(secret):
                await self._app(scope, receive, with_cookie)
        except TooManyStreams as error:
            await answer(send, 503, f"{error}. Close other pages.\n", [(b"retry-after", b"10")])

    async def _identified(self, scope: Message, certificate: bytes | None) -> tuple[str, Reader | None, Session | None]:
        """The session of a request, and a new one for a certificate that has none yet."""
        if not self._identities.needs_login:
            return "", await self._identities.reader(""), None
        secret, address = self._secret(scope), _address(scope)
        if secret and not self._unknown.wait_s(address):
            if (reader := await self._identities.reader(secret)) is not None:
                return secret, reader, None
            self._unknown.add(address)
        if certificate is None:
            return secret, None, None
        new = await self._identities.open_by_certificate(certificate)
        if new is None:
            return "", None, None
        return new.secret, await self._identities.reader(new.secret), new

    async def _log_in(self, scope: Message, send: Send) -> None:
        """Exchange the code of a link for a session. The redirect takes the code out of the address."""
        if (wait_s := self._failed.wait_s(_address(scope))) > 0:
            text = "There were too many failed logins from this address. Wait a minute.\n"
            await answer(send, 429, text, [(b"retry-after", str(int(wait_s) + 1).encode())])
            return
        if scope["method"] != "GET":
            await answer(send, 405, "Expected GET.\n", [(b"allow", b"GET")])
            return
        codes = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=8).get("code", [])
        session = None
        if len(codes) == 1 and codes[0].isascii() and len(codes[0]) <= MOST_SECRET:
            session = await self._identities.open_by_code(codes[0])
        if session is None:
            self._failed.add(_address(scope))
            await self._needs_login(scope, send, "The link is unknown, used or too old.")
            return
        cookie = self._set_cookie(session.secret, session.seconds)
        await answer(send, 303, "", [(b"location", b"/"), cookie])

    async def _log_out(self, scope: Message, send: Send) -> None:
        if secret := self._secret(scope):
            await self._identities.close_session(secret)
        await answer(send, 303, "", [(b"location", b"/"), self._set_cookie("", 0)])

    async def _needs_login(self, scope: Message, send: Send, why: str = "") -> None:
        text, headers = f"{why} " if why else "", [(b"www-authenticate", b"Cookie")]
        if self._secret(scope):  # the browser has no use for it
            headers.append(self._set_cookie("", 0))
        await answer(send, 401, f"{text}This page needs a login. {self._how}\n", headers)

    def _secret(self, scope: Message) -> str:
        """The session in the cookie; empty without one."""
        cookies: SimpleCookie = SimpleCookie()
        for header in headers_of(scope).get("cookie", ()):
            try:
                cookies.load(header)
            except CookieError:
                return ""
        found = cookies.get(self._cookie)
        secret = "" if found is None else found.value
        return secret if secret.isascii() and secret.isprintable() and len(secret) <= MOST_SECRET else ""

    def _set_cookie(self, secret: str, seconds: float) -> tuple[bytes, bytes]:
        parts = [f"{self._cookie}={secret}", "Path=/", f"Max-Age={int(seconds)}", "HttpOnly", "SameSite=Strict"]
        return b"set-cookie", "; ".join([*parts, *(["Secure"] if self._secure else [])]).encode()


async def _refused_call(request: Request, error: Exception) -> Response:
    """The coordinator knows the session no more: the browser needs another login."""
    if not isinstance(error, grpc.aio.AioRpcError) or error.code() is not grpc.StatusCode.UNAUTHENTICATED:
        raise error
    setattr(request.state, _ENDED, True)
    return Response("The session has ended. Open the page with a new login link.\n", 401, media_type="text/plain")


def _address(scope: Message) -> str:
    client: Any = scope.get("client")
    return str(client[0]) if client else ""
