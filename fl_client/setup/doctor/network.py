"""Checks of the way to the coordinator: its name, port and TLS, and the device's clock.

Python's ssl reports causes for which grpc has one message.
"""

from __future__ import annotations

import errno
import socket
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from fl_client.settings.config import ClientConfig, TlsConfig
from fl_client.setup.doctor.files import read
from fl_client.setup.doctor.findings import Finding, fail, ok, warn
from fl_common import proxies
from fl_common.certificates.names import SCHEME, NoHolder, holder_of, hosts_of, uris_of
from fl_common.proxies import choice_for, proxy_for
from fl_common.settings import split_address
from fl_common.units import counted

SECONDS = 5.0
"""Timeout of one connection."""


def find_leader(config: ClientConfig) -> tuple[str, Finding]:
    """The first address whose port is open, which the later checks use: a coordinator that waits has closed it."""
    addresses = (config.server, *config.standbys)
    for address in addresses:
        try:
            proxies.connect(address, proxy_for(address, config.proxy), SECONDS).close()
        except OSError:
            continue
        return address, ok("addresses", f"{address} leads, of {', '.join(addresses)}")
    message = f"expected an open port at one of {', '.join(addresses)}, got none"
    return config.server, warn("addresses", message, "does a coordinator run, and lead?")


def check_proxy(config: ClientConfig) -> Iterator[Finding]:
    """Name the proxy of the connection and what chose it, or why there is none."""
    choice = choice_for(config.server, config.proxy)
    if choice.unusable:
        yield warn("proxy", f"none: {choice.why}", "set proxy in the settings, or correct the variable")
    else:
        yield ok("proxy", choice.why if choice.proxy is not None else f"none: {choice.why}")


def look_up(config: ClientConfig) -> Iterator[Finding]:
    """Resolve the coordinator's name, or the proxy's, which then resolves the coordinator's."""
    proxy = proxy_for(config.server, config.proxy)
    host, port = split_address(config.server if proxy is None else proxy.address)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        fix = (
            "no name server answered: is the network up? resolvectl status"
            if error.errno == socket.EAI_AGAIN
            else f"check server in the settings, and the name server: getent hosts {host}"
        )
        fix = fix if proxy is None else f"check {proxy.source}; {_without(proxy)}"
        yield fail("name", f"expected an address for {host}, got: {error.strerror}", fix)
        return
    yield ok("name", f"{host} is {', '.join(dict.fromkeys(str(entry[4][0]) for entry in addresses))}")


def connect(config: ClientConfig) -> Iterator[Finding]:
    """Open a TCP connection, and measure its time."""
    proxy, began = proxy_for(config.server, config.proxy), time.monotonic()
    through = "" if proxy is None else f" through {proxy}"
    try:
        open_connection(config).close()
    except OSError as error:
        fix = _fix(error) if proxy is None else f"is {proxy} needed, and does it allow this port? {_without(proxy)}"
        yield fail("port", f"expected a connection to {config.server}{through}, got: {error}", fix)
        return
    yield ok("port", f"{config.server} is open{through}, connected in {1000 * (time.monotonic() - began):.0f} ms")


def open_connection(config: ClientConfig) -> socket.socket:
    """A connection, through the proxy if there is one, which the caller closes. Raises OSError."""
    return proxies.connect(config.server, proxy_for(config.server, config.proxy), SECONDS)


def _fix(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "the port is closed: is the coordinator running, and is this the port of its `listen`?"
    if isinstance(error, TimeoutError):
        return "no answer: is there a firewall? the coordinator's port for clients must be open"
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return "there is no route: is the network up? ip route get ADDRESS"
    return "check the network: ip route, ping"


def _without(proxy: proxies.Proxy) -> str:
    setting = 'proxy = "none" in the settings'
    return f"if not, {proxy.without(setting)}"


def check_clock(config: ClientConfig) -> Finding:
    """Compare the clock with the dates of this program's files, the device's certificate, and its CA's."""
    earliest = {"this program was installed": datetime.fromtimestamp(Path(__file__).stat().st_mtime, UTC)}
    if config.tls is not None:
        for path in (config.tls.ca, config.tls.cert):
            if certificate := read(path):
                earliest[f"{path} was made"] = certificate.not_valid_before_utc
    now = datetime.now(UTC)
    what, when = max(earliest.items(), key=lambda named: named[1])
    if now < when:
        return fail(
            "clock",
            f"expected a time after {when:%Y-%m-%d %H:%M} UTC, when {what}, got {now:%Y-%m-%d %H:%M} UTC",
            "set the clock: sudo timedatectl set-ntp true, and check with timedatectl that it is synchronized",
        )
    return ok("clock", f"{now:%Y-%m-%d %H:%M} UTC, plausible")


_WRONG_HOST = {62, 64}
_EXPIRED, _NOT_YET = 10, 9
"""OpenSSL's error numbers X509_V_ERR_*."""
_SOON_DAYS = 7


class _ClosedAfterHandshake(ConnectionResetError):
    """A server with TLS 1.3 has refused the client's certificate: it closes the connection after the handshake."""


def check_tls(config: ClientConfig) -> Iterator[Finding]:
    """Do a handshake with this device's certificate. No finding without [tls]."""
    if config.tls is None:
        return
    try:
        certificate = _shake(config, verifying(config.tls))
    except ssl.SSLCertVerificationError as error:
        yield _unverified(config, error)
    except _ClosedAfterHandshake as error:
        yield fail("tls", f"expected the coordinator to accept this device's certificate, got: {error}", _NOT_TAKEN)
    except (ssl.SSLEOFError, ConnectionError) as error:
        message = f"expected a TLS handshake, got a connection that was closed in it: {error or type(error).__name__}"
        yield fail("tls", message, _CLOSED)
    except ssl.SSLError as error:
        yield _refused(error)
    except OSError as error:
        message = f"expected a TLS handshake, got: {error or type(error).__name__}"
        yield fail("tls", message, "is there a firewall, or is it no coordinator?")
    else:
        days = (certificate.not_valid_after_utc - datetime.now(UTC)).days
        if days < _SOON_DAYS:
            message = f"the coordinator's certificate ends in {counted(days, 'day')}"
            yield warn("tls", message, _RENEW)
        yield from _other_role(certificate)
        yield ok("tls", f"{split_address(config.server)[0]} has a certificate signed by {config.tls.ca}")


def verifying(tls: TlsConfig) -> ssl.SSLContext:
    """A context that trusts the coordinator's authority alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as grpc does
    context.load_verify_locations(tls.ca)
    if tls.min_version == "1.3":
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _other_role(certificate: x509.Certificate) -> Iterator[Finding]:
    """A certificate with a URI of this project must name a server. Other certificates have only the host's name.

    The daemon itself relies on the host's name and on the purpose serverAuth, which the transport checks.
    """
    try:
        if not any(uri.startswith(f"{SCHEME}:") for uri in uris_of(certificate)):
            return
        holder = holder_of(certificate)
    except NoHolder as none:
        yield fail("tls", f"expected a coordinator's certificate, got one without a holder: {none}", _RENEW)
        return
    if holder.role != "server":
        yield fail("tls", f"expected a coordinator's certificate, got one of {holder.uri}", _RENEW)


def uses_tls(config: ClientConfig) -> bool:
    """Whether the server uses TLS, with any certificate."""
    try:
        _shake(config, _trusting())
    except _ClosedAfterHandshake:
        return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
    return True


def open_channel(config: ClientConfig, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection with TLS and this device's certificate, which the caller closes. Raises OSError."""
    context.set_alpn_protocols(["h2"])
    if config.tls is not None:
        context.load_cert_chain(config.tls.cert, config.tls.key)
    with open_connection(config) as connection:
        channel = context.wrap_socket(connection, server_hostname=split_address(config.server)[0])
    channel.settimeout(SECONDS)
    return channel


def _shake(config: ClientConfig, context: ssl.SSLContext) -> x509.Certificate:
    """Handshake until the peer's first byte: in TLS 1.3 it refuses a client's certificate only behind it."""
    with open_channel(config, context) as channel:
        der = channel.getpeercert(binary_form=True)
        if channel.selected_alpn_protocol() != "h2":
            raise ssl.SSLError(0, _NO_HTTP2)
        try:
            first = channel.recv(1)
        except ConnectionResetError:
            first = b""
        if not first:
            raise _ClosedAfterHandshake("the connection was closed after the handshake")
    return x509.load_der_x509_certificate(der or b"")


def _trusting() -> ssl.SSLContext:
    """A context that accepts any certificate, to read it. Nothing is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _unverified(config: ClientConfig, error: ssl.SSLCertVerificationError) -> Finding:
    """The reason why this device does not trust the coordinator's certificate, with the certificate's content."""
    try:
        with open_channel(config, _trusting()) as channel:  # without what the peer says of ours: a proxy may close then
            certificate = x509.load_der_x509_certificate(channel.getpeercert(binary_form=True) or b"")
    except OSError as again:
        return fail("tls", f"expected a certificate signed by tls.ca, got: {error.verify_message}; then: {again}")
    host, now = split_address(config.server)[0], datetime.now(UTC)
    if error.verify_code in _WRONG_HOST:
        message = f"expected a certificate for {host}, got one for {', '.join(hosts_of(certificate)) or 'no host'}"
        return fail("tls", message, f"set server to one of these, or issue another: `fl ca issue server --host {host}`")
    if error.verify_code in (_EXPIRED, _NOT_YET):
        message = (
            f"expected a certificate of the coordinator that is valid now, {now:%Y-%m-%d}, got one that is valid from"
            f" {certificate.not_valid_before_utc:%Y-%m-%d} to {certificate.not_valid_after_utc:%Y-%m-%d}"
            f" ({error.verify_message})"
        )
        return fail("tls", message, f"{_RENEW}; or this device's clock is wrong: timedatectl")
    issuer = certificate.issuer.rfc4514_string()
    message = f"expected a certificate signed by {config.tls and config.tls.ca}, got one of {issuer}"
    fix = "copy ca.crt of the authority that signed it"
    if not any(uri.startswith(f"{SCHEME}:") for uri in uris_of(certificate)):
        fix = (
            "`fl ca` did not make it. If a proxy on the way opens TLS to look inside, its operator has to pass"
            f" {config.server} through unopened: no other certificate than this device's is taken; else {fix}"
        )
    return fail("tls", f"{message} ({error.verify_message})", fix)


def _refused(error: ssl.SSLError) -> Finding:
    """A handshake that the server ended."""
    reason = error.reason or str(error)
    if any(words in reason for words in _OLD_TLS):
        return fail("tls", "expected TLS 1.3, got a server that has only older versions", _NO_TLS_1_3)
    if "ALERT" in reason:
        message = (
            f"expected the coordinator to accept this device's certificate, got: {reason.lower().replace('_', ' ')}"
        )
        return fail("tls", message, _NOT_TAKEN)
    if _NO_HTTP2 in str(error):
        return fail("tls", f"expected a coordinator, got: {_NO_HTTP2}", "is this the port of its `listen`?")
    message = f"expected TLS, got something else ({reason.lower().replace('_', ' ')})"
    fix = "the server uses plain text: it is another program's port, or a coordinator without [tls]"
    return fail("tls", message, fix)


_CLOSED = (
    "no certificate was checked: the coordinator is starting or ending, a proxy or port-forward in between has lost it,"
    " or another program listens there"
)
_NOT_TAKEN = "it must be signed by tls.client_ca of the coordinator, and be valid by the coordinator's clock"
_RENEW = "the operator renews it: `fl ca issue server --host HOST --force`"
_OLD_TLS = ("PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL")
_NO_TLS_1_3 = (
    'a coordinator has TLS 1.3: is there a proxy in between? If it cannot do better, set tls.min_version = "1.2"'
)
_NO_HTTP2 = "TLS without HTTP/2, so not grpc"
