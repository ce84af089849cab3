"""Explains a failed call to an operator: by its error detail, its status code, or why nothing was reached."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from fl_common.certificates.names import OPERATOR_ROLES
from fl_common.proxies import Proxy
from fl_ops.admin.settings import Certificates, Token
from fl_ops.errors import NotAllowed, NotFound, OpsError, Refused, Unreachable, UsageError
from protos.fl.v1 import errors_pb2

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


def explain(failure: FailedCall) -> OpsError:
    """The error for the operator: what happened and what to do."""
    by_detail = _BY_DETAIL.get(type(failure.detail))
    if by_detail is not None:
        return by_detail(failure, failure.detail)
    return _BY_CODE.get(failure.code, _refused)(failure)


# The coordinator's text is a complete sentence. The sentences below are for a call that failed without a text.


def _invalid_field(failure: FailedCall, detail: errors_pb2.InvalidField) -> OpsError:
    return UsageError(failure.text or f"{detail.field}: expected {detail.expected}, got {detail.came}")


def _run(failure: FailedCall, detail: errors_pb2.UnknownRun) -> OpsError:
    if failure.code == "ALREADY_EXISTS":
        return Refused(failure.text or f"there is a run {detail.run_id!r} already: choose another --name")
    return NotFound(failure.text or f"no run {detail.run_id!r} at {failure.server}: `fl run list` lists the runs")


def _unknown_client(failure: FailedCall, detail: errors_pb2.UnknownClient) -> OpsError:
    own = f"no client {detail.client_id!r} at {failure.server}: `fl clients list` lists the clients"
    return NotFound(failure.text or own)


def _wrong_run_state(failure: FailedCall, detail: errors_pb2.WrongRunState) -> OpsError:
    own = f"run {detail.run_id!r} is {detail.state}; the call needs it to be {' or '.join(detail.allowed_states)}"
    return Refused(failure.text or own)


def _not_allowed(failure: FailedCall, detail: errors_pb2.NotAllowed) -> OpsError:
    caller = repr(detail.identity) if detail.identity else "a caller without a certificate"
    own = f"{failure.server} does not allow {caller} to do this; needed: {detail.needed}"
    return NotAllowed(f"{failure.text or own} ({_remedy(detail)})")


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


def _retry_later(failure: FailedCall, detail: errors_pb2.RetryLater) -> OpsError:
    seconds = detail.wait.ToTimedelta().total_seconds()
    return Refused(failure.text or f"{failure.server} is busy: try again in {seconds:g} s")


_BY_DETAIL: dict[type[Any], Callable[[FailedCall, Any], OpsError]] = {
    errors_pb2.InvalidField: _invalid_field,
    errors_pb2.UnknownRun: _run,
    errors_pb2.UnknownClient: _unknown_client,
    errors_pb2.WrongRunState: _wrong_run_state,
    errors_pb2.NotAllowed: _not_allowed,
    errors_pb2.RetryLater: _retry_later,
}


def _unavailable(failure: FailedCall) -> OpsError:
    why = why_unreachable(failure.server, failure.text, failure.security)
    if failure.proxy is not None:
        why = failure.proxy.explained(why, failure.text, "FL_USE_PROXY=0 or --no-proxy")
    return Unreachable(why)


def _no_answer_in_time(failure: FailedCall) -> OpsError:
    return Unreachable(
        f"{failure.server} did not answer in time: check that it is the admin address of a coordinator, and its logs"
    )


def _forbidden(failure: FailedCall) -> OpsError:
    return NotAllowed(f"{failure.server} does not allow this: {failure.text} ({_ADMIN_CERTIFICATE})")


def _unknown_call(failure: FailedCall) -> OpsError:
    return Refused(
        f"{failure.server} does not know this call: expected the admin address of a coordinator of this version "
        f"({failure.text})"
    )


def _refused(failure: FailedCall) -> OpsError:
    return Refused(f"{failure.server}: {failure.text or 'no reason was given'} ({failure.code})")


_BY_CODE: dict[str, Callable[[FailedCall], OpsError]] = {
    "UNAVAILABLE": _unavailable,
    "CANCELLED": _unavailable,
    "DEADLINE_EXCEEDED": _no_answer_in_time,
    "PERMISSION_DENIED": _forbidden,
    "UNAUTHENTICATED": _forbidden,
    "UNIMPLEMENTED": _unknown_call,
    "NOT_FOUND": lambda failure: NotFound(f"{failure.server}: {failure.text}"),
    "INVALID_ARGUMENT": lambda failure: UsageError(f"{failure.server}: {failure.text}"),
}
