"""Explains a failed call to an operator, by its error detail if there is one, otherwise by its status code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from fl_common.certificates.names import OPERATOR_ROLES
from fl_common.proxies import Proxy
from fl_ops.admin.settings import Certificates, Token
from fl_ops.admin.unreachable import why_unreachable
from fl_ops.errors import NotAllowed, NotFound, OpsError, Refused, Unreachable, UsageError
from protos.fl.v1 import errors_pb2

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
    role = next((each for each in detail.roles if each in _OPERATORS), "")
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
