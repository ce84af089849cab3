"""The authority of a coordinator, found by its fingerprint in the chain that the coordinator presents.

The chain is read without any check, because nothing is trusted yet. Only a certificate with the expected SHA-256 is
used, as the only root of the verified connection that follows. So a chain of someone else can only fail.
"""

from __future__ import annotations

import ipaddress
import re
import select
import socket
import time

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL

from fl_client.errors import UsageError
from fl_common.proxies import Proxy, connect
from fl_common.settings import split_address

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


def fingerprint_of(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate in DER, as hexadecimal digits."""
    return certificate.fingerprint(hashes.SHA256()).hex()


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
    shown = "\n".join(f"  {fingerprint_of(each)}  {each.subject.rfc4514_string()}" for each in chain[:_MOST_SHOWN])
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
        through = "" if proxy is None else f" through {proxy} (--no-proxy connects without it)"
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
"""For a server that speaks something else."""
