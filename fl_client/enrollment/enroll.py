"""Gets a certificate for a token: the authority by its fingerprint, the key on the disk, the call, the files.

The same call after a crash gets the same certificate, because key and request are kept until `end_pending`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import select
import socket
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL

from fl_client.enrollment.folder import CertificateFolder, Issued, KeyRequest, checked
from fl_client.errors import FailedCall, NotAllowed, Refused, TransportError, Unreachable, UsageError
from fl_common.certificates.names import NoHolder, holder_of
from fl_common.certificates.pem import fingerprint as fingerprint_of
from fl_common.certificates.pem import invalid_now
from fl_common.proxies import ENVIRONMENT, Proxy, connect, proxy_for
from fl_common.settings import split_address
from protos.fl.v1.enrollment_pb2 import EnrollRequest, IssuedCertificate

if TYPE_CHECKING:
    from fl_client.connection.transport import GrpcEnrollment

SECONDS = 20.0
"""Time limit of connection and handshake."""
_DIGITS = 64
_MOST_SHOWN = 6


def parse_fingerprint(text: str) -> str:
    """A SHA-256 fingerprint as 64 small hexadecimal digits. Colons, spaces and a leading "sha256:" are allowed.

    Raises ValueError.
    """
    digits = re.sub(r"[\s:]", "", re.sub(r"^sha-?256[:=]", "", text.strip().lower()))
    if re.fullmatch(rf"[0-9a-f]{{{_DIGITS}}}", digits) is None:
        raise ValueError(
            f"expected the SHA-256 of the authority's certificate, {_DIGITS} hexadecimal digits, got {text[:100]!r}"
        )
    return digits


def find_authority(address: str, fingerprint: str, proxy: Proxy | None = None) -> bytes:
    """The certificate with this fingerprint from the coordinator's chain, as PEM.

    Args:
        address: host:port of the coordinator's port for enrollment.
        fingerprint: as `parse_fingerprint` returns it.
        proxy: of the connection; None for a direct one.

    Raises:
        UsageError: no TLS server answers, or no authority of its chain has the fingerprint.
    """
    chain = presented_chain(address, proxy)
    for certificate in chain:
        if fingerprint_of(certificate) == fingerprint:
            if not _may_sign(certificate):
                raise UsageError(
                    f"--ca-fingerprint: expected that of an authority, got that of the certificate"
                    f" {certificate.subject.rfc4514_string()!r}, which may not sign others; {_TODO}"
                )
            return certificate.public_bytes(Encoding.PEM)
    shown = "\n".join(
        f"  {fingerprint_of(certificate)}  {certificate.subject.rfc4514_string()}"
        for certificate in chain[:_MOST_SHOWN]
    )
    raise UsageError(
        f"no certificate of {address} has the fingerprint {fingerprint}. It presented:\n{shown}\nNothing was sent to"
        f" it. {_TODO}. If the fingerprint is right, this is not your coordinator, or someone is in between"
    )


def presented_chain(address: str, proxy: Proxy | None = None) -> list[x509.Certificate]:
    """The certificates that a TLS server presents, unchecked, its own first. Raises UsageError if there is none."""
    try:
        with connect(address, proxy, SECONDS) as connected:
            chain = _shake(connected, split_address(address)[0])
    except OSError as error:
        through = "" if proxy is None else f" through {proxy} (--proxy none connects without it)"
        raise UsageError(
            f"{address} cannot be reached{through}: {error.strerror or error}; is this the coordinator's enroll_listen,"
            " and does a firewall allow it?"
        ) from None
    except SSL.Error as error:
        raise UsageError(f"{address}: expected a TLS 1.3 handshake, got {_reason(error)}; {_NO_TLS}") from None
    if not chain:
        raise UsageError(f"{address}: expected a chain of certificates, got none; {_NO_TLS}")
    return chain


def _shake(connected: socket.socket, host: str) -> list[x509.Certificate]:
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_alpn_protos([b"h2"])
    connection = SSL.Connection(context, connected)
    connection.set_connect_state()
    if not _is_address(host):
        connection.set_tlsext_host_name(host.encode("idna"))
    ends = time.monotonic() + SECONDS
    while not _handshake_done(connection, connected, ends):
        pass
    return list(connection.get_peer_cert_chain(as_cryptography=True) or [])


def _handshake_done(connection: SSL.Connection, connected: socket.socket, ends: float) -> bool:
    """One step of the handshake. False: the network is ready for the next. Raises TimeoutError, SSL.Error."""
    left, ready = max(0.0, ends - time.monotonic()), False
    try:
        connection.do_handshake()
    except SSL.WantReadError:
        ready = bool(select.select([connected], [], [], left)[0])
    except SSL.WantWriteError:
        ready = bool(select.select([], [connected], [], left)[1])
    else:
        return True
    if not ready:
        raise TimeoutError(f"no TLS handshake within {SECONDS:g} s")
    return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _may_sign(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _reason(error: SSL.Error) -> str:
    """OpenSSL's words, without its library and function names."""
    queue = error.args[0] if error.args and isinstance(error.args[0], list) else []
    return ", ".join(str(entry[-1]) for entry in queue) or str(error) or "a closed connection"


_TODO = "compare the fingerprint with the one that `fl enroll create` printed at the coordinator"
_NO_TLS = "is this the coordinator's enroll_listen?"
"""The hint for a server that speaks something else."""


TRIES = 5
"""Calls at most, while the coordinator asks for a later call."""
LONGEST_WAIT_S = 60.0
SOON_S = 5.0
"""A certificate that begins in so many seconds is waited for."""


@dataclass(frozen=True)
class Enrollment:
    """Where and with what a device enrolls."""

    address: str
    """host:port of the coordinator's port for enrollment."""
    token: str = field(repr=False)
    fingerprint: str | None
    """The fingerprint of the coordinator's authority; None: `authority` is known."""
    authority: bytes = b""
    """PEM of the trusted authority."""
    name: str = ""
    """The requested client id; empty: the token's."""
    proxy: str = ENVIRONMENT
    """A `ProxySetting`."""

    def into(self, folder: CertificateFolder) -> Issued:
        """Get the certificate and put it in use. Raises UsageError, which names the cause and what to do."""
        # Imported here, so that `fl-client --help` is quick.
        from fl_client.connection.transport import GrpcEnrollment  # noqa: PLC0415

        proxy, pin = proxy_for(self.address, self.proxy), self.fingerprint
        authority = self.authority if pin is None else find_authority(self.address, pin, proxy)
        try:
            issued = self._issued(GrpcEnrollment(self.address, authority, proxy), folder)
            self._check(issued, folder)
            folder.install(issued)
        except OSError as error:
            raise UsageError(
                f"{folder.path} cannot be written: {error.strerror or error}; use sudo, or another --state-dir"
            ) from None
        except FailedCall as error:
            raise UsageError(f"the coordinator at {self.address} failed: {error}; its log has the cause") from None
        except Unreachable as error:
            raise UsageError(f"no answer from {self.address}: {error}; the same command may be repeated") from None
        except (NotAllowed, Refused) as error:
            raise UsageError(f"the coordinator refused the enrollment: {error}; {_REFUSED}") from None
        except TransportError as error:
            raise UsageError(f"{self.address}: {error}") from None
        return issued

    def _issued(self, calls: GrpcEnrollment, folder: CertificateFolder) -> Issued:
        """The answer for the pending key. A refused key of a certificate, which may be revoked, is replaced once."""
        request, reused = folder.pending(), folder.reuses_key()
        try:
            answer = asyncio.run(self._call(calls, request))
        except (NotAllowed, Refused):
            if not reused:
                raise
            request = folder.begin_again()
            answer = asyncio.run(self._call(calls, request))
        return checked(answer, request.key, self.name)

    async def _call(self, calls: GrpcEnrollment, request: KeyRequest) -> IssuedCertificate:
        """The answer. Where the coordinator asks for a later call, the call is repeated."""
        message = EnrollRequest(token=self.token, csr=request.csr, name=self.name)
        for _ in range(TRIES - 1):
            try:
                return await calls.enroll(message)
            except Unreachable as error:
                if error.wait is None:
                    raise
                await asyncio.sleep(min(max(error.wait, 0.0), LONGEST_WAIT_S))
        return await calls.enroll(message)

    def _check(self, issued: Issued, folder: CertificateFolder) -> None:
        """Raises UsageError for the certificate of another device, or of a coordinator that is not the pinned one."""
        leaf = x509.load_pem_x509_certificate(issued.cert)
        early_s = leaf.not_valid_before_utc.timestamp() - time.time()
        if 0 < early_s <= SOON_S:  # after a revocation a name's next certificate begins a moment later
            time.sleep(early_s)
        if invalid := invalid_now(leaf, datetime.now(UTC)):
            raise UsageError(
                f"the new certificate {invalid}: set the clock of this device (timedatectl), then repeat the command"
            )
        authorities = x509.load_pem_x509_certificates(issued.ca)
        if self.fingerprint is not None and self.fingerprint not in map(fingerprint_of, authorities):
            raise UsageError(
                f"expected the authority with the fingerprint {self.fingerprint} in the coordinator's answer, got"
                f" {', '.join(map(fingerprint_of, authorities))}: the coordinator's settings are wrong"
            )
        if (before := name_in(folder)) is not None and before != issued.name:
            raise UsageError(
                f"expected a token for {before!r}, whose files are in {folder.path.parent}, got one for"
                f" {issued.name!r}: use that device's token, or another --state-dir"
            )


def name_in(folder: CertificateFolder) -> str | None:
    """The client id of the certificate in use. None if there is none."""
    leaf = folder.certificate()
    try:
        return None if leaf is None else holder_of(leaf).name
    except NoHolder:
        return None


_REFUSED = "a token has one use and a time limit; the operator makes a new one: `fl enroll create --name NAME`"
