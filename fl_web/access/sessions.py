"""Logins and cookies: gives each request the Reader of its browser, or shows what a login needs."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

import grpc
import grpc.aio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from fl_common.rate_limits import network_of
from fl_web.access.identities import MOST_SECRET, Identities, Session, browser_address
from fl_web.access.requests import (
    LOGIN,
    LOGOUT,
    STREAMS,
    Application,
    FailedLogins,
    Message,
    OpenStreams,
    Receive,
    Send,
    TooManyStreams,
    answer,
    headers_of,
    host_port,
)
from fl_web.coordinator.reader import Reader
from fl_web.rendering import rendered

log = logging.getLogger(__name__)

STREAM = "/live"
_MOST_FORM = 1024
"""The longest form, in bytes."""
PUBLIC = ("/static/", "/healthz")
"""Addresses that need no login."""
PEER_CERTIFICATE = "peer_certificate"
"""The key in the state of a request's scope with the client certificate that TLS has verified (DER), or None."""
_ENDED = "access_session_ended"
_USED = "The link is unknown, used or too old."


@dataclass(frozen=True, slots=True)
class _Found:
    """Whose request it is."""

    secret: str = ""
    reader: Reader | None = None
    new: Session | None = None
    """Opened for the browser's certificate with this request."""
    is_void: bool = False
    """Whether the browser has a cookie that was checked and opens nothing."""


class Sessions:
    """ASGI application: the page with its logins."""

    def __init__(self, app: Starlette, identities: Identities, how: str, *, secure: bool) -> None:
        """how: a person's way to a login link, as text. secure: whether the page is served with TLS."""
        app.add_exception_handler(grpc.aio.AioRpcError, _refused_call)
        self._app: Application = app
        self._identities, self._how, self._secure = identities, how, secure
        self._codes, self._cookies, self._certificates = FailedLogins(), FailedLogins(), FailedLogins()
        """The failures with links and cookies that were not given out here, by address; and with certificates."""
        self._streams = OpenStreams() if identities.needs_login else OpenStreams(per_session=STREAMS)
        self._cookie = "__Host-impetus" if secure else "impetus"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        path, state = scope["path"], scope.setdefault("state", {})
        browser_address.set(host_port(scope["client"]) if scope.get("client") else "")
        certificate, state["reader"] = state.pop(PEER_CERTIFICATE, None), None
        if path.startswith(PUBLIC):
            await self._app(scope, receive, send)
            return
        try:
            if path == LOGIN and self._identities.needs_login:
                await self._log_in(scope, receive, send)
            elif path == LOGOUT:
                await self._log_out(scope, receive, send)
            else:
                await self._page(scope, receive, send, certificate)
        except grpc.aio.AioRpcError as error:  # of a call for the session: the application has not answered yet
            log.warning("the coordinator does not answer: %s", error.code().name)
            await answer(send, 503, "The coordinator does not answer. Try again.\n", [(b"retry-after", b"3")])

    async def _page(self, scope: Message, receive: Receive, send: Send, certificate: bytes | None) -> None:
        identified = await self._identified(scope, certificate)
        secret, new = identified.secret, identified.new
        if identified.reader is None:
            await self._needs_login(send, is_void=identified.is_void)
            return
        scope["state"]["reader"] = identified.reader

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

    async def _identified(self, scope: Message, certificate: bytes | None) -> _Found:
        """The session of a request, or a new one for a certificate that has none yet.

        A session that was given out here is always looked up. Only made-up ones are limited, and a cookie that was not
        looked up is left to its browser.
        """
        if not self._identities.needs_login:
            return _Found(reader=await self._identities.reader(""))
        secret, caller, is_void = self._secret(scope), network_of(browser_address.get()), False
        if secret and (self._identities.is_own(secret) or not self._cookies.wait_s(caller)):
            if (reader := await self._identities.reader(secret)) is not None:
                return _Found(secret, reader)
            is_void = True
            if not self._identities.is_own(secret):
                self._cookies.add(caller)
        new = None if certificate is None else await self._opened_by(certificate)
        if new is None:
            return _Found(is_void=is_void)
        return _Found(new.secret, await self._identities.reader(new.secret), new)

    async def _opened_by(self, certificate: bytes) -> Session | None:
        """A session for a certificate. One that opens none is not tried again and again."""
        caller = hashlib.sha256(certificate).hexdigest()
        if self._certificates.wait_s(caller):
            return None
        session = await self._identities.open_by_certificate(certificate)
        if session is None:
            self._certificates.add(caller)
        return session

    async def _log_in(self, scope: Message, receive: Receive, send: Send) -> None:
        """Show the form of a link, or exchange its code for a session. The redirect takes the code out of the address.

        A program that opens links before a person does uses none up, because it does not send the form.
        """
        if scope["method"] != "POST":
            code = _code(scope["query_string"])
            if not (holder := await self._identities.holder_of_link(code)):
                await self._needs_login(send, _USED)
                return
            text = f"This link is for {holder}. Log in only if you asked for it yourself. It works once."
            await self._show({"title": "Log in", "text": text, "action": LOGIN, "code": code}, scope, receive, send)
            return
        code, caller = _code(await _form(receive)), network_of(browser_address.get())
        is_own = self._identities.is_own(code)
        if not is_own and (wait_s := self._codes.wait_s(caller)) > 0:
            text = "There were too many failed logins from this address. Wait a minute.\n"
            await answer(send, 429, text, [(b"retry-after", str(int(wait_s) + 1).encode())])
            return
        session = await self._identities.open_by_code(code) if code else None
        if session is None:
            if not is_own:
                self._codes.add(caller)
            await self._needs_login(send, _USED)
            return
        cookie = self._set_cookie(session.secret, session.seconds)
        await answer(send, 303, "", [(b"location", b"/"), cookie])

    async def _log_out(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            text = "The session of this browser ends. Another login needs another link."
            await self._show({"title": "Log out", "text": text, "action": LOGOUT, "code": ""}, scope, receive, send)
            return
        if (secret := self._secret(scope)) and self._identities.is_own(secret):
            await self._identities.close_session(secret)
        await answer(send, 303, "", [(b"location", b"/"), self._set_cookie("", 0)])

    @staticmethod
    async def _show(form: dict[str, str], scope: Message, receive: Receive, send: Send) -> None:
        """A page with a button."""
        context = {"view": "confirm", "live": "", "who": None, **form}
        await HTMLResponse(rendered("confirm.html", context))(scope, receive, send)

    async def _needs_login(self, send: Send, why: str = "", *, is_void: bool = False) -> None:
        """is_void: whether the browser has no use for its cookie."""
        text, headers = f"{why} " if why else "", [(b"www-authenticate", b"Cookie")]
        if is_void:
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
        cookie = cookies.get(self._cookie)
        secret = "" if cookie is None else cookie.value
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


async def _form(receive: Receive) -> bytes:
    """The body of a request; empty for one that is too long."""
    body, more = b"", True
    while more and len(body) <= _MOST_FORM:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body if len(body) <= _MOST_FORM else b""


def _code(query: bytes) -> str:
    """The code in an address or in a form; empty if there is none, or something else."""
    try:
        codes = parse_qs(query.decode("latin-1"), max_num_fields=8).get("code", [])
    except ValueError:  # of more fields
        return ""
    return codes[0] if len(codes) == 1 and codes[0].isascii() and len(codes[0]) <= MOST_SECRET else ""
