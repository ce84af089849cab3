"""The web page of a coordinator: the socket for the process that serves it, the logins of browsers, and the process.

On the socket the Admin service answers the methods that read, for the sessions of browsers. Nothing else may call it:
only the owner of the state directory can open the socket. The audit log has each login and logout.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import grpc.aio
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding

from fl_common.certificates.leaf import is_issuer
from fl_common.certificates.names import OPERATOR_ROLES
from fl_common.certificates.pem import PemWatcher
from fl_common.own_secrets import new_key, new_secret
from fl_common.settings import SettingsError
from fl_server import identity
from fl_server.audit.log import AuditLog, AuditRecord
from fl_server.enrollment.grants import Revocations
from fl_server.errors import Forbidden, TooMany, Unauthenticated
from fl_server.identity import Identity, of_certificate
from fl_server.metrics import Metrics
from fl_server.settings.config import ServerConfig
from fl_server.web import process
from protos.fl.v1 import web_pb2 as pb
from protos.fl.v1 import web_pb2_grpc
from protos.wire import timestamp

Context = grpc.aio.ServicerContext[Any, Any]

LINK_S = 60.0
"""A link can be used for this long."""
SESSION_S = 8 * 3600.0
"""Longest session. It ends with the operator's certificate or token before that."""
MOST_LINKS = 16
"""Unused links of one operator; the oldest makes room."""
MOST_SESSIONS = 16
"""Sessions of one operator; the oldest makes room."""
MOST_OF_ALL = 4096
"""Sessions of all operators."""
_AGAIN = "ask for another link with `fl web open`"


@dataclass(frozen=True, slots=True)
class Opened:
    """A new link or session."""

    secret: str
    ends: float
    """Unix seconds."""
    holder: Identity


class _Held:
    """Secrets by their hash, each with its holder and its end. The oldest first."""

    def __init__(self, key: bytes, per_holder: int, why: str) -> None:
        self._key, self._per_holder, self._why = key, per_holder, why
        self._holders: OrderedDict[bytes, tuple[Identity, float]] = OrderedDict()

    def add(self, who: Identity, seconds: float) -> Opened:
        """A new secret of a holder, which ends with the holder's certificate at the latest. Raises TooMany."""
        now = time.time()
        own = [key for key, (holder, _) in self._holders.items() if (holder, holder.source) == (who, who.source)]
        ended = [key for key, (_, ends) in self._holders.items() if ends <= now]
        for key in {*own[: max(0, len(own) + 1 - self._per_holder)], *ended}:
            del self._holders[key]
        if len(self._holders) >= MOST_OF_ALL:
            raise TooMany(f"{MOST_OF_ALL:,} {self._why}, which is the limit", LINK_S, routine=True)
        secret, ends = new_secret(self._key), min(now + seconds, inf if who.ends is None else who.ends)
        self._holders[_hash(secret)] = who, ends
        return Opened(secret, ends, who)

    def of(self, secret: str) -> Identity | None:
        """The holder of a secret that has not ended."""
        who, ends = self._holders.get(_hash(secret), (None, 0.0))
        return who if time.time() < ends else None

    def remove(self, secret: str) -> None:
        """Forget a secret."""
        self._holders.pop(_hash(secret), None)

    def drop_denied(self, revocations: Revocations) -> None:
        """Forget the secrets of holders whose certificates are revoked now."""
        for key in [key for key, (holder, _) in self._holders.items() if revocations.denied(holder)]:
            del self._holders[key]


class WebSessions:
    """The login links and sessions of browsers. A session has the identity of its link's operator, to read only.

    They are in memory, by the hash of their secret: after a restart an operator asks for another link. Lives on the
    event loop.
    """

    def __init__(self, revocations: Revocations) -> None:
        self._revocations = revocations
        self.url = ""
        """The address of the page, as browsers reach it."""
        self.key = new_key()
        """Key of codes and sessions: the web process tells made-up ones by it (`fl_common/own_secrets.py`)."""
        self._links = _Held(self.key, MOST_LINKS, "login links are open")
        self._sessions = _Held(self.key, MOST_SESSIONS, "sessions are open")

    def link(self, who: Identity) -> Opened:
        """A code for one login of an operator."""
        return self._links.add(_operator(who), LINK_S)

    def holder_of_link(self, code: str) -> Identity:
        """The operator whose link a code is of. Raises Unauthenticated."""
        if (holder := self._links.of(code)) is None:
            raise Unauthenticated(f"the login link is unknown, used or older than {LINK_S:.0f} s: {_AGAIN}")
        return holder

    def open_by_code(self, code: str) -> Opened:
        """A session for a code, which is used up. Raises Unauthenticated."""
        holder = self.holder_of_link(code)
        self._links.remove(code)
        return self._open(holder)

    def open_by_certificate(self, who: Identity) -> Opened:
        """A session for the holder of a verified certificate. Raises Forbidden, CertificateEnded, Unauthenticated."""
        who.check_time()
        return self._open(_operator(who))

    def _open(self, who: Identity) -> Opened:
        if why := self._revocations.denied(who):
            raise Unauthenticated(f"the certificate of {who} is revoked ({why})")
        return self._sessions.add(who, SESSION_S)

    def close(self, secret: str) -> Identity | None:
        """End a session. Returns its holder; None for one that has ended or is unknown."""
        holder = self._sessions.of(secret)
        self._sessions.remove(secret)
        return holder

    def drop_denied(self) -> None:
        """End the links and sessions of operators whose certificates are revoked now."""
        self._links.drop_denied(self._revocations)
        self._sessions.drop_denied(self._revocations)

    async def identity(self, token: str) -> Identity:
        """The operator of a session; `Tokens` for the web process's socket. Raises Unauthenticated."""
        if (holder := self._sessions.of(token)) is None:
            raise Unauthenticated(f"the session of this browser has ended: {_AGAIN}")
        return holder


def _operator(who: Identity) -> Identity:
    if who.roles.isdisjoint(OPERATOR_ROLES):
        raise Forbidden(str(who), "the role of an operator", OPERATOR_ROLES)
    return who


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


class WebLoginService(web_pb2_grpc.WebLoginServicer):
    """Answers the web process."""

    def __init__(self, sessions: WebSessions, certificates: PemWatcher | None, audit: AuditLog) -> None:
        """certificates: with the authorities that sign operators' certificates; None: there are none."""
        self._sessions, self._certificates, self._audit = sessions, certificates, audit

    async def GetLink(self, request: pb.GetLinkRequest, context: Context) -> pb.GetLinkResponse:
        """Whose link a code is of."""
        return pb.GetLinkResponse(identity=str(self._sessions.holder_of_link(request.code)))

    async def OpenByCode(self, request: pb.OpenByCodeRequest, context: Context) -> pb.OpenByCodeResponse:
        """A session for the code of a link."""
        opened = self._sessions.open_by_code(request.code)
        await self._record("OpenByCode", opened.holder)
        return pb.OpenByCodeResponse(session=_session(opened))

    async def OpenByCertificate(
        self, request: pb.OpenByCertificateRequest, context: Context
    ) -> pb.OpenByCertificateResponse:
        """A session for a certificate of a browser."""
        who = self._holder(request.certificate)
        opened = self._sessions.open_by_certificate(who)
        await self._record("OpenByCertificate", who)
        return pb.OpenByCertificateResponse(session=_session(opened))

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        """End a session."""
        if (who := self._sessions.close(request.secret)) is not None:
            await self._record("CloseSession", who)
        return pb.CloseSessionResponse()

    async def _record(self, method: str, who: Identity) -> None:
        """Add a row for a login or logout of an operator. The browser waits for it for some seconds."""
        await self._audit.record_in_time(AuditRecord(str(who), identity.address.get(), method, "web page", "ok"))

    def _holder(self, certificate: bytes) -> Identity:
        """The holder of a certificate that one of the authorities signed. Raises Unauthenticated, Forbidden."""
        authorities = None if self._certificates is None else self._certificates.pem.ca
        try:
            leaf = x509.load_der_x509_certificate(certificate)
            trusted = x509.load_pem_x509_certificates(authorities or b"")
        except (ValueError, UnsupportedAlgorithm):
            raise Unauthenticated("the browser's certificate cannot be read") from None
        if not any(is_issuer(authority, leaf) for authority in trusted):
            raise Unauthenticated("the browser's certificate is not signed by an authority of tls.client_ca")
        return of_certificate(leaf.public_bytes(Encoding.PEM))


def _session(opened: Opened) -> pb.WebSession:
    return pb.WebSession(secret=opened.secret, ends=timestamp(opened.ends))


class WebPage:
    """The web page of a coordinator: its socket, its process, and the sessions of its browsers."""

    def __init__(self, config: ServerConfig, sessions: WebSessions, certificates: PemWatcher | None) -> None:
        """certificates: the files of `[tls]`. Raises SettingsError for files of the page that cannot be used."""
        self._config, self._sessions, self._certificates = config, sessions, certificates
        self._server: grpc.aio.Server | None = None
        self._running: asyncio.Task[None] | None = None
        self.process: process.WebProcess | None = None
        self._own: process.PageCertificate | None = None
        if certificates is not None and config.tls is not None and config.web_tls is not None:
            self._own = process.PageCertificate(config.web_tls, config.tls, certificates)

    async def start(self, server: grpc.aio.Server, address: str, audit: AuditLog, metrics: Metrics) -> str:
        """Serve the page at an address. Returns host:port. Raises SettingsError.

        server: has the Admin service, and gets the logins and the socket.
        """
        process.require_packages()
        listening = process.listening_socket(address)
        host, port = address.rpartition(":")[0], listening.getsockname()[1]
        self._sessions.url = process.page_url(self._config, f"{host}:{port}")
        path = process.coordinator_socket(self._config.state_dir)
        logins = WebLoginService(self._sessions, self._certificates, audit)
        web_pb2_grpc.add_WebLoginServicer_to_server(logins, server)
        try:
            server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise SettingsError(f"web_listen: cannot make the socket {path}: {error}") from error
        path.chmod(0o600)
        self._server = server
        await server.start()
        self._sockets = path, listening.fileno()
        self.process = process.WebProcess(self._settings(), listening.fileno(), metrics.web_process_ends)
        self._running = asyncio.create_task(self.process.run())
        self._running.add_done_callback(lambda _: listening.close())
        return f"{host}:{port}"

    def _settings(self) -> bytes:
        """The line of settings of the web process, as it is now."""
        tls = None if self._own is None else self._own.values()
        return process.line_for(self._config, process.Page(*self._sockets, self._sessions.key, tls))

    def poll(self) -> None:
        """Read the page's certificate again. Blocking."""
        if self._own is not None:
            self._own.poll()

    def renew(self) -> None:
        """Give the web process what `poll` has found."""
        if self.process is not None:
            self.process.renew(self._settings())

    async def stop(self) -> None:
        """End the process, and close the socket."""
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running
        if self._server is not None:
            await self._server.stop(0.2)
