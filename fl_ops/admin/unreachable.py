"""Explains why no call reaches a coordinator: from grpc's text, and from the operator's own certificate.

grpc has one status code for all of it. The patterns were measured with the grpc version in constraints.txt; a text that
none of them knows gets the general explanation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from fl_ops.admin.settings import Certificates

_CONNECTING = "failed to connect"


def why_unreachable(server: str, text: str, certificates: Certificates | None) -> str:
    """The explanation with its remedy. text: of grpc; certificates: None for a connection in plain text."""
    cases = _PLAIN if certificates is None else _TLS
    for pattern, explain in cases:
        if re.search(pattern, text, re.DOTALL):
            return f"{explain(server, certificates)} ({text})"
    security = (
        "a port with TLS needs your certificates (--ca, --cert, --key)"
        if certificates is None
        else "a port without TLS accepts no certificates"
    )
    return (
        f"no coordinator answers at {server}: start one with `fl-server --config server.toml`, or give its admin "
        f"address with --server. If one is running there: {security} ({text})"
    )


def _nobody_listens(server: str, _: Certificates | None) -> str:
    return (
        f"no coordinator answers at {server}, where no program listens: start one with `fl-server --config"
        " server.toml`, or give its admin address with --server; start a port-forward again if it has ended"
    )


def _closed_before_tls(server: str, _: Certificates | None) -> str:
    return (
        f"the connection to {server} was closed in the TLS handshake, before a certificate was checked: the"
        " coordinator is starting or ending, a port-forward has lost its pod, or a proxy or another program listens"
        " there. Try again, start the port-forward again, and check --server"
    )


def _closed_in_plain_text(server: str, _: Certificates | None) -> str:
    return (
        f"{server} closes connections in plain text: a coordinator with TLS needs your certificates (--ca, --cert,"
        " --key) in place of --insecure; a port-forward may have lost its pod"
    )


def _not_accepted(server: str, certificates: Certificates | None) -> str:
    """In TLS 1.3 a server refuses the client's certificate after the client's own part of the handshake."""
    own = "your certificate" if certificates is None else _described(certificates)
    return (
        f"the coordinator at {server} refused {own}. It expects one of the authority in its tls.client_ca, valid by its"
        " clock: `fl ca issue admin NAME` makes one in the folder of that authority, `fl ca renew` renews it"
    )


def _described(certificates: Certificates) -> str:
    """The operator's certificate in words: its authority and its end."""
    from cryptography import x509  # imported here: commands without a connection must not wait for it

    def read(path: Path) -> x509.Certificate:
        return x509.load_pem_x509_certificate(path.read_bytes())

    try:
        leaf, authority = read(certificates.cert), read(certificates.ca)
    except (OSError, ValueError):
        return f"the certificate {certificates.cert}"
    issuer, expected = leaf.issuer.rfc4514_string(), authority.subject.rfc4514_string()
    end: datetime = leaf.not_valid_after_utc
    words = f"the certificate {certificates.cert}, issued by {issuer!r} and valid until {end:%Y-%m-%d %H:%M} UTC"
    try:
        leaf.verify_directly_issued_by(authority)
    except Exception:  # noqa: BLE001 - of several kinds, also from an authority with another type of key
        return f"{words}; the coordinator's own certificate is from {expected!r} (--ca), another authority"
    return words


def _expired(server: str, _: Certificates | None) -> str:
    return (
        f"the certificate of the coordinator at {server}, or that of its authority, has expired: `fl ca renew` renews"
        " it; or the clock of this machine is wrong"
    )


def _not_yet_valid(server: str, _: Certificates | None) -> str:
    return (
        f"the certificate of the coordinator at {server}, or that of its authority, is not valid yet: check the clock"
        " of this machine"
    )


def _other_authority(server: str, certificates: Certificates | None) -> str:
    ca = "--ca" if certificates is None else f"--ca {certificates.ca}"
    return (
        f"the certificate of the coordinator at {server} is not signed by the authority in {ca}: give the ca.crt of the"
        " authority that signed it; or another program listens there"
    )


def _other_host(server: str, _: Certificates | None) -> str:
    return (
        f"the certificate of the coordinator at {server} is for other host names: give one of its names with --server,"
        " or make it for this host too: `fl ca issue server --host HOST`"
    )


def _plain_text(server: str, _: Certificates | None) -> str:
    return (
        f"{server} uses plain text, which accepts no certificates: use --insecure on the coordinator's own machine, or"
        " check --server"
    )


def _old_tls(server: str, _: Certificates | None) -> str:
    return (
        f"{server} has no TLS 1.3: check --server, and whether a proxy is in between; FL_TLS_MIN_VERSION=1.2 allows the"
        " older version"
    )


_Explain = Callable[[str, Certificates | None], str]
_CLOSED = r"Socket closed|Connection reset|Broken pipe"
_TLS: tuple[tuple[str, _Explain], ...] = (
    ("Connection refused", _nobody_listens),
    ("Handshake read failed|Handshake write failed", _closed_before_tls),
    ("CERTIFICATE_VERIFY_FAILED: certificate has expired", _expired),
    ("CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", _not_yet_valid),
    ("CERTIFICATE_VERIFY_FAILED", _other_authority),
    ("Hostname Verification Check failed", _other_host),
    ("WRONG_VERSION_NUMBER", _plain_text),
    ("SSLV3_ALERT_HANDSHAKE_FAILURE", _old_tls),
    (f"{_CONNECTING}.*({_CLOSED})", _not_accepted),
)
_PLAIN: tuple[tuple[str, _Explain], ...] = (
    ("Connection refused", _nobody_listens),
    (f"{_CONNECTING}.*({_CLOSED})", _closed_in_plain_text),
)
"""The first pattern that is in grpc's text counts."""
