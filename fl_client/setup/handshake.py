"""TLS with the coordinator, by Python's own: it tells apart what grpc has one message for."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime

from cryptography import x509

from fl_client.config import ClientConfig
from fl_client.setup.findings import Finding, fail, ok, warn
from fl_client.setup.network import SECONDS, opened
from protos.holder import SCHEME, NoHolder, holder_of, uris_of
from protos.settings import split_address

_WRONG_HOST = {62, 64}
_EXPIRED, _NOT_YET = 10, 9
"""X509_V_ERR_*, the numbers of OpenSSL for why a certificate is refused."""
_SOON_DAYS = 7


class _ClosedBehindIt(ConnectionResetError):
    """How grpc refuses a client's certificate in TLS 1.3: the handshake is over, and then nothing comes."""


def look(config: ClientConfig) -> Iterator[Finding]:
    """A whole handshake with this device's certificate, and what it fails with; nothing without [tls]."""
    if config.tls is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as grpc does
    context.load_verify_locations(config.tls.ca)
    try:
        certificate = _shake(config, context)
    except ssl.SSLCertVerificationError as error:
        yield _unverified(config, error)
    except ssl.SSLError as error:
        yield _refused(error)
    except _ClosedBehindIt as error:
        yield fail("tls", f"expected the coordinator to take this device's certificate, got: {error}", _NOT_TAKEN)
    except OSError as error:
        said = f"expected a TLS handshake, got: {error or type(error).__name__}"
        yield fail("tls", said, "what answers hangs up: a proxy or a firewall on the way, or no coordinator?")
    else:
        days = (certificate.not_valid_after_utc - datetime.now(UTC)).days
        if days < _SOON_DAYS:
            said = f"the coordinator's certificate ends in {days} days"
            yield warn("tls", said, _RENEW)
        yield from _other_role(certificate)
        yield ok("tls", f"{split_address(config.server)[0]} has a certificate that {config.tls.ca} signed")


def _other_role(certificate: x509.Certificate) -> Iterator[Finding]:
    """A certificate that names its holder in our way must name a server; others have no URI, and the host's name only.

    Running, a daemon relies on the host's name and on the purpose (serverAuth) that the transport looks at.
    """
    try:
        if not any(uri.startswith(f"{SCHEME}:") for uri in uris_of(certificate)):
            return
        holder = holder_of(certificate)
    except NoHolder as none:
        yield fail("tls", f"expected a coordinator's certificate, got one of nobody: {none}", _RENEW)
        return
    if holder.role != "server":
        yield fail("tls", f"expected a coordinator's certificate, got one of {holder.uri}", _RENEW)


def speaks_tls(config: ClientConfig) -> bool:
    """Whether TLS answers at a port, whatever its certificate."""
    try:
        _shake(config, _trusting())
    except _ClosedBehindIt:
        return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
    return True


def _shake(config: ClientConfig, context: ssl.SSLContext) -> x509.Certificate:
    """Handshake until the peer's first byte: in TLS 1.3 it refuses a client's certificate only behind it."""
    context.set_alpn_protocols(["h2"])
    if config.tls is not None:
        context.load_cert_chain(config.tls.cert, config.tls.key)
    with (
        opened(config) as connection,
        context.wrap_socket(connection, server_hostname=split_address(config.server)[0]) as channel,
    ):
        channel.settimeout(SECONDS)
        der = channel.getpeercert(binary_form=True)
        if channel.selected_alpn_protocol() != "h2":
            raise ssl.SSLError(0, _NO_HTTP2)
        try:
            first = channel.recv(1)
        except ConnectionResetError:
            first = b""
        if not first:
            raise _ClosedBehindIt("the connection was closed right behind the handshake")
    return x509.load_der_x509_certificate(der or b"")


def _trusting() -> ssl.SSLContext:
    """To see a certificate that would be refused; nothing is sent over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _unverified(config: ClientConfig, error: ssl.SSLCertVerificationError) -> Finding:
    """Why this device does not trust the coordinator's certificate, with what that says of itself."""
    try:
        certificate = _shake(config, _trusting())
    except OSError as again:
        return fail("tls", f"expected a certificate that tls.ca signed, got: {error.verify_message}; then: {again}")
    host, now = split_address(config.server)[0], datetime.now(UTC)
    if error.verify_code in _WRONG_HOST:
        said = f"expected a certificate for {host}, got one for {', '.join(_hosts(certificate)) or 'no host at all'}"
        return fail("tls", said, f"let server be one of these, or issue another: `fl ca issue server --host {host}`")
    if error.verify_code in (_EXPIRED, _NOT_YET):
        said = (
            f"expected a certificate of the coordinator that is valid now, {now:%Y-%m-%d}, got one that is valid from"
            f" {certificate.not_valid_before_utc:%Y-%m-%d} to {certificate.not_valid_after_utc:%Y-%m-%d}"
            f" ({error.verify_message})"
        )
        return fail("tls", said, f"{_RENEW}; or is this device's clock wrong? timedatectl")
    issuer = certificate.issuer.rfc4514_string()
    said = f"expected a certificate that one in {config.tls and config.tls.ca} signed, got one of {issuer}"
    return fail("tls", f"{said} ({error.verify_message})", "copy ca.crt of the authority that signed it")


def _refused(error: ssl.SSLError) -> Finding:
    """A handshake that the other side ended."""
    reason = error.reason or str(error)
    if "ALERT" in reason:
        said = f"expected the coordinator to take this device's certificate, got: {reason.lower().replace('_', ' ')}"
        return fail("tls", said, _NOT_TAKEN)
    if _NO_HTTP2 in str(error):
        return fail("tls", f"expected a coordinator, got: {_NO_HTTP2}", "is this the port of its `listen`?")
    said = f"expected TLS, got something else ({reason.lower().replace('_', ' ')})"
    mend = "what answers speaks plain text: another program's port, or a coordinator without [tls]"
    return fail("tls", said, mend)


def _hosts(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


_NOT_TAKEN = "it must be signed by tls.client_ca of the coordinator, and be valid by the coordinator's clock"
_RENEW = "tell its operator: `fl ca issue server --host HOST --force`"
_NO_HTTP2 = "TLS without HTTP/2, which is no grpc"
