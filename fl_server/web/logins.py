"""The WebLogin service: sessions for codes and for client certificates. The audit log has each login and logout."""

from __future__ import annotations

from typing import Any

import grpc.aio
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding

from fl_common.certificates.pem import PemWatcher
from fl_server import identity
from fl_server.audit.log import AuditLog
from fl_server.audit.writer import AuditRecord
from fl_server.errors import Unauthenticated
from fl_server.identity import Identity, of_certificate
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
