"""The web page of a coordinator: the socket for the process that serves it, the logins of browsers, and the process.

On the socket the Admin service answers the methods that read, for the sessions of browsers. Nothing else may call it:
only the owner of the state directory can open the socket. The audit log has each login and logout.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc.aio
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding

from fl_common.certificates.pem import PemWatcher
from fl_common.settings import SettingsError
from fl_server import identity
from fl_server.audit.log import AuditLog
from fl_server.audit.writer import AuditRecord
from fl_server.errors import Unauthenticated
from fl_server.identity import Identity, of_certificate
from fl_server.metrics import Metrics
from fl_server.settings.config import ServerConfig
from fl_server.web.process import (
    Page,
    PageCertificate,
    WebProcess,
    coordinator_socket,
    line_for,
    listening_socket,
    page_url,
    require_packages,
)
from fl_server.web.sessions import Opened, WebSessions
from protos.fl.v1 import web_pb2 as pb
from protos.fl.v1 import web_pb2_grpc
from protos.wire import timestamp

Context = grpc.aio.ServicerContext[Any, Any]


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
        if not any(_signed(authority, leaf) for authority in trusted):
            raise Unauthenticated("the browser's certificate is not signed by an authority of tls.client_ca")
        return of_certificate(leaf.public_bytes(Encoding.PEM))


def _signed(authority: x509.Certificate, leaf: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _session(opened: Opened) -> pb.WebSession:
    return pb.WebSession(secret=opened.secret, ends=timestamp(opened.ends))


class WebPage:
    """The web page of a coordinator: its socket, its process, and the sessions of its browsers."""

    def __init__(self, config: ServerConfig, sessions: WebSessions, certificates: PemWatcher | None) -> None:
        """certificates: the files of `[tls]`. Raises SettingsError for files of the page that cannot be used."""
        self._config, self._sessions, self._certificates = config, sessions, certificates
        self._server: grpc.aio.Server | None = None
        self._running: asyncio.Task[None] | None = None
        self.process: WebProcess | None = None
        self._own: PageCertificate | None = None
        if certificates is not None and config.tls is not None and config.web_tls is not None:
            self._own = PageCertificate(config.web_tls, config.tls, certificates)

    async def start(self, server: grpc.aio.Server, address: str, audit: AuditLog, metrics: Metrics) -> str:
        """Serve the page at an address. Returns host:port. Raises SettingsError.

        server: has the Admin service, and gets the logins and the socket.
        """
        require_packages()
        listening = listening_socket(address)
        host, port = address.rpartition(":")[0], listening.getsockname()[1]
        self._sessions.url = page_url(self._config, f"{host}:{port}")
        path = coordinator_socket(self._config.state_dir)
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
        self.process = WebProcess(self._settings(), listening.fileno(), metrics.web_process_ends)
        self._running = asyncio.create_task(self.process.run())
        self._running.add_done_callback(lambda _: listening.close())
        return f"{host}:{port}"

    def _settings(self) -> bytes:
        """The line of settings of the web process, as it is now."""
        tls = None if self._own is None else self._own.values()
        return line_for(self._config, Page(*self._sockets, self._sessions.key, tls))

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
