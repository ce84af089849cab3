"""Explains a failed call to an operator: by its error detail, its status code, or why nothing was reached."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from google.protobuf.message import Message

from fl_common.certificates.names import OPERATOR_ROLES
from fl_common.proxies import Proxy
from fl_ops.admin.settings import Certificates, Token
from fl_ops.errors import NotAllowed, NotFound, OpsError, Refused, Unreachable, UsageError
from protos.fl.v1 import errors_pb2

_STARTS_ONE = "start one with `fl-server --config server.toml`, or give its admin address with --server"
_NOBODY_LISTENS = {
    "Connection refused": (
        f"no coordinator answers at {{server}}, where no program listens: {_STARTS_ONE}; start a port-forward again "
        "if it has ended"
    ),
}
_CLOSED = "failed to connect.*(Socket closed|Connection reset|Broken pipe)"
_PLAIN = {
    **_NOBODY_LISTENS,
    "Trying to connect an http1.x server": (
        "a server of web pages or metrics answers at {server}, or one with TLS: expected the address of the "
        "coordinator's admin_listen, 127.0.0.1:7071 by default; with TLS give your certificates (--ca, --cert, --key)"
    ),
    _CLOSED: (
        "{server} closes connections in plain text: a coordinator with TLS needs your certificates (--ca, "
        "--cert, --key) in place of --insecure; a port-forward may have lost its pod"
    ),
    "": (
        f"no coordinator answers at {{server}}: {_STARTS_ONE}. If one is running there: a port with TLS needs "
        "your certificates (--ca, --cert, --key)"
    ),
}
_TLS = {
    **_NOBODY_LISTENS,
    "Handshake read failed|Handshake write failed": (
        "the connection to {server} was closed in the TLS handshake, before a certificate was checked: the "
        "coordinator is starting or ending, a port-forward has lost its pod, or a proxy or another program "
        "listens there. Try again, start the port-forward again, and check --server"
    ),
    "CERTIFICATE_VERIFY_FAILED: certificate has expired": (
        "the certificate of the coordinator at {server}, or that of its authority, has expired: `fl ca renew` "
        "renews it; or the clock of this machine is wrong"
    ),
    "CERTIFICATE_VERIFY_FAILED: certificate is not yet valid": (
        "the certificate of the coordinator at {server}, or that of its authority, is not valid yet: check the "
        "clock of this machine"
    ),
    "CERTIFICATE_VERIFY_FAILED": (
        "the certificate of the coordinator at {server} is not signed by the authority in {ca}: give the "
        "ca.crt of the authority that signed it; or another program listens there"
    ),
    "Hostname Verification Check failed": (
        "the certificate of the coordinator at {server} is for other host names: give one of its names with "
        "--server, or make it for this host too: `fl ca issue server --host HOST`"
    ),
    "WRONG_VERSION_NUMBER": (
        "{server} uses plain text, which accepts no certificates: use --insecure on the coordinator's own "
        "machine, or check --server"
    ),
    "SSLV3_ALERT_HANDSHAKE_FAILURE": (
        "{server} has no TLS 1.3: check --server, and whether a proxy is in between; FL_TLS_MIN_VERSION=1.2 allows "
        "the older version"
    ),
    _CLOSED: (  # in TLS 1.3 a server refuses the client's certificate after the client's own part of the handshake
        "the coordinator at {server} refused {own}. It expects one of the authority in its tls.client_ca, valid "
        "by its clock: `fl ca issue admin NAME` makes one in the folder of that authority, `fl ca renew` renews "
        "it"
    ),
    "": (
        f"no coordinator answers at {{server}}: {_STARTS_ONE}. If one is running there: a port without TLS "
        "accepts no certificates"
    ),
}
"""Pattern -> explanation: the first pattern that is in grpc's text counts; the last one is in every text."""


_WANTS_CERTIFICATE = (
    "the coordinator at {server} asks for a certificate there, and you have a token: give the address of its "
    "token_listen with --server"
)


def why_unreachable(server: str, text: str, security: Certificates | Token | None) -> str:
    """The explanation with its remedy. text: of grpc; security: None for a connection in plain text."""
    cases = _PLAIN if security is None else _TLS
    pattern, template = next(case for case in cases.items() if re.search(case[0], text, re.DOTALL))
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


_ADMIN_CERTIFICATE = "`fl ca issue admin NAME` makes an admin's certificate"
_OPERATORS = frozenset(OPERATOR_ROLES)


@dataclass(frozen=True)
class FailedCall:
    """A failed call. code: name of the status code; text: its message; detail: its message of errors.proto.

    security: of the connection; None: plain text. proxy: of the connection; None: direct.
    """

    server: str
    security: Certificates | Token | None
    code: str
    text: str
    detail: Message | None = None
    proxy: Proxy | None = None


def explain(failure: FailedCall) -> OpsError:  # noqa: PLR0911 - one for each code
    """The error for the operator: what happened and what to do."""
    if failure.detail is not None and (explained := _by_detail(failure)) is not None:
        return explained
    server, text = failure.server, failure.text
    match failure.code:
        case "UNAVAILABLE" | "CANCELLED":
            why = why_unreachable(server, text, failure.security)
            if failure.proxy is not None:
                why = failure.proxy.explained(why, text, "--proxy none or FL_PROXY=none")
            return Unreachable(why)
        case "DEADLINE_EXCEEDED":
            return Unreachable(
                f"{server} did not answer in time: check that it is the admin address of a coordinator, and its logs"
            )
        case "PERMISSION_DENIED" | "UNAUTHENTICATED":
            return NotAllowed(f"{server} does not allow this: {text} ({_ADMIN_CERTIFICATE})")
        case "UNIMPLEMENTED":
            return Refused(
                f"{server} does not know this call: expected the admin address of a coordinator of this version "
                f"({text})"
            )
        case "NOT_FOUND":
            return NotFound(f"{server}: {text}")
        case "INVALID_ARGUMENT":
            return UsageError(f"{server}: {text}")
        case code:
            return Refused(f"{server}: {text or 'no reason was given'} ({code})")


def _by_detail(failure: FailedCall) -> OpsError | None:  # noqa: PLR0911 - one for each message
    """The error by its message of errors.proto; None for another message.

    The coordinator's text is a complete sentence. The sentences here are for a call that failed without a text.
    """
    server, text = failure.server, failure.text
    match failure.detail:
        case errors_pb2.InvalidField(field=field, expected=expected, came=came):
            return UsageError(text or f"{field}: expected {expected}, got {came}")
        case errors_pb2.UnknownRun(run_id=run_id) if failure.code == "ALREADY_EXISTS":
            return Refused(text or f"there is a run {run_id!r} already: choose another --name")
        case errors_pb2.UnknownRun(run_id=run_id):
            return NotFound(text or f"no run {run_id!r} at {server}: `fl run list` lists the runs")
        case errors_pb2.UnknownClient(client_id=client_id):
            return NotFound(text or f"no client {client_id!r} at {server}: `fl clients list` lists the clients")
        case errors_pb2.WrongRunState(run_id=run_id, state=state, allowed_states=allowed):
            return Refused(text or f"run {run_id!r} is {state}; the call needs it to be {' or '.join(allowed)}")
        case errors_pb2.NotAllowed() as detail:
            caller = repr(detail.identity) if detail.identity else "a caller without a certificate"
            own = f"{server} does not allow {caller} to do this; needed: {detail.needed}"
            return NotAllowed(f"{text or own} ({_remedy(detail)})")
        case errors_pb2.RetryLater(wait=wait):
            return Refused(text or f"{server} is busy: try again in {wait.ToTimedelta().total_seconds():g} s")
    return None


def _remedy(detail: errors_pb2.NotAllowed) -> str:
    """How to get a role that is needed; the first one allows least."""
    role = next((possible for possible in detail.roles if possible in _OPERATORS), "")
    if not role:  # a right that no role has
        return "`fl whoami` shows your roles" if detail.roles else _ADMIN_CERTIFICATE
    make = "fl ca issue"  # the role is a command of its own
    return (
        f"`{make} {role} NAME` makes a certificate with the role {role}, or a group of your token gives it; `fl whoami`"
        " shows your roles"
    )
