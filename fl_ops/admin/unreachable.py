"""Explains why no call reaches a coordinator: from grpc's text, and from the operator's own certificate.

grpc has one status code for all of it. The patterns were measured with the grpc version in constraints.txt; a text that
none of them knows gets the general explanation.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from fl_ops.admin.settings import Certificates, Token

_STARTS_ONE = "start one with `fl-server --config server.toml`, or give its admin address with --server"
_NOBODY_LISTENS = (
    "Connection refused",
    (
        f"no coordinator answers at {{server}}, where no program listens: {_STARTS_ONE}; start a port-forward again "
        "if it has ended"
    ),
)
_CLOSED = "failed to connect.*(Socket closed|Connection reset|Broken pipe)"
_PLAIN: tuple[tuple[str, str], ...] = (
    _NOBODY_LISTENS,
    (
        _CLOSED,
        (
            "{server} closes connections in plain text: a coordinator with TLS needs your certificates (--ca, "
            "--cert, --key) in place of --insecure; a port-forward may have lost its pod"
        ),
    ),
    (
        "",
        (
            f"no coordinator answers at {{server}}: {_STARTS_ONE}. If one is running there: a port with TLS needs "
            "your certificates (--ca, --cert, --key)"
        ),
    ),
)
_TLS: tuple[tuple[str, str], ...] = (
    _NOBODY_LISTENS,
    (
        "Handshake read failed|Handshake write failed",
        (
            "the connection to {server} was closed in the TLS handshake, before a certificate was checked: the "
            "coordinator is starting or ending, a port-forward has lost its pod, or a proxy or another program "
            "listens there. Try again, start the port-forward again, and check --server"
        ),
    ),
    (
        "CERTIFICATE_VERIFY_FAILED: certificate has expired",
        (
            "the certificate of the coordinator at {server}, or that of its authority, has expired: `fl ca renew` "
            "renews it; or the clock of this machine is wrong"
        ),
    ),
    (
        "CERTIFICATE_VERIFY_FAILED: certificate is not yet valid",
        (
            "the certificate of the coordinator at {server}, or that of its authority, is not valid yet: check the "
            "clock of this machine"
        ),
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        (
            "the certificate of the coordinator at {server} is not signed by the authority in {ca}: give the "
            "ca.crt of the authority that signed it; or another program listens there"
        ),
    ),
    (
        "Hostname Verification Check failed",
        (
            "the certificate of the coordinator at {server} is for other host names: give one of its names with "
            "--server, or make it for this host too: `fl ca issue server --host HOST`"
        ),
    ),
    (
        "WRONG_VERSION_NUMBER",
        (
            "{server} uses plain text, which accepts no certificates: use --insecure on the coordinator's own "
            "machine, or check --server"
        ),
    ),
    (
        "SSLV3_ALERT_HANDSHAKE_FAILURE",
        (
            "{server} has no TLS 1.3: check --server, and whether a proxy is in between; FL_TLS_MIN_VERSION=1.2 allows "
            "the older version"
        ),
    ),
    (
        _CLOSED,  # in TLS 1.3 a server refuses the client's certificate after the client's own part of the handshake
        (
            "the coordinator at {server} refused {own}. It expects one of the authority in its tls.client_ca, valid "
            "by its clock: `fl ca issue admin NAME` makes one in the folder of that authority, `fl ca renew` renews "
            "it"
        ),
    ),
    (
        "",
        (
            f"no coordinator answers at {{server}}: {_STARTS_ONE}. If one is running there: a port without TLS "
            "accepts no certificates"
        ),
    ),
)
"""(pattern, explanation): the first pattern that is in grpc's text counts; the last one is in every text."""


_WANTS_CERTIFICATE = (
    "the coordinator at {server} asks for a certificate there, and you have a token: give the address of its "
    "token_listen with --server"
)


def why_unreachable(server: str, text: str, security: Certificates | Token | None) -> str:
    """The explanation with its remedy. text: of grpc; security: None for a connection in plain text."""
    cases = _PLAIN if security is None else _TLS
    pattern, template = next(case for case in cases if re.search(case[0], text, re.DOTALL))
    words = {"server": server, "ca": "--ca"}
    if security is not None:
        words["ca"] = f"--ca {security.ca}"
    if isinstance(security, Token) and pattern == _CLOSED:
        template = _WANTS_CERTIFICATE
    elif isinstance(security, Certificates) and "{own}" in template:
        words["own"] = _described(security)
    return f"{template.format_map(words)} ({text})"


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
