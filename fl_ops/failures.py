"""A failed call in an operator's words: by its detail where there is one, else by its status code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from fl_ops.errors import Misused, NotAllowed, NotFound, OpsError, Refused, Unreachable
from protos.fl.v1 import errors_pb2


@dataclass(frozen=True)
class Failure:
    """What is known of a failed call: the address, the status code by name, its text, and a message of errors.proto."""

    server: str
    code: str
    text: str
    detail: Message | None = None


def explain(failure: Failure) -> OpsError:
    """The error that tells an operator what happened and what to do."""
    by_detail = _BY_DETAIL.get(type(failure.detail))
    if by_detail is not None:
        return by_detail(failure, failure.detail)
    return _BY_CODE.get(failure.code, _refused)(failure)


def _sentence(failure: Failure, own: str, *facts: str) -> str:
    """The coordinator's sentence if it states the detail's facts, else our own and then the coordinator's."""
    if failure.text and all(fact in failure.text for fact in facts):
        return failure.text
    return f"{own}. {failure.text}" if failure.text else own


def _invalid_field(failure: Failure, detail: errors_pb2.InvalidField) -> OpsError:
    own = f"{detail.field}: expected {detail.expected}, got {detail.came}"
    return Misused(_sentence(failure, own, detail.field, detail.expected, detail.came))


def _run(failure: Failure, detail: errors_pb2.UnknownRun) -> OpsError:
    if failure.code == "ALREADY_EXISTS":
        own = f"there is a run {detail.run_id!r} already: choose another --name"
        return Refused(_sentence(failure, own, detail.run_id))
    own = f"no run {detail.run_id!r} at {failure.server}: `fl run list` lists the runs"
    return NotFound(_sentence(failure, own, detail.run_id))


def _unknown_client(failure: Failure, detail: errors_pb2.UnknownClient) -> OpsError:
    own = f"no client {detail.client_id!r} at {failure.server}: `fl clients list` lists the clients"
    return NotFound(_sentence(failure, own, detail.client_id))


def _wrong_run_state(failure: Failure, detail: errors_pb2.WrongRunState) -> OpsError:
    own = f"run {detail.run_id!r} is {detail.state}, and this needs one that is {' or '.join(detail.allowed_states)}"
    return Refused(_sentence(failure, own, detail.run_id, detail.state, *detail.allowed_states))


def _not_allowed(failure: Failure, detail: errors_pb2.NotAllowed) -> OpsError:
    who = repr(detail.identity) if detail.identity else "a caller without a certificate"
    own = f"{failure.server} does not let {who} do this; needed: {detail.needed}"
    sentence = _sentence(failure, own, detail.identity, detail.needed)
    return NotAllowed(f"{sentence} (`fl ca issue admin NAME` makes an admin's certificate)")


def _retry_later(failure: Failure, detail: errors_pb2.RetryLater) -> OpsError:
    seconds = detail.wait.ToTimedelta().total_seconds()
    return Refused(_sentence(failure, f"{failure.server} is busy: try again in {seconds:g} s", "try again in"))


_BY_DETAIL: dict[type[Any], Callable[[Failure, Any], OpsError]] = {
    errors_pb2.InvalidField: _invalid_field,
    errors_pb2.UnknownRun: _run,
    errors_pb2.UnknownClient: _unknown_client,
    errors_pb2.WrongRunState: _wrong_run_state,
    errors_pb2.NotAllowed: _not_allowed,
    errors_pb2.RetryLater: _retry_later,
}


def _unavailable(failure: Failure) -> OpsError:
    server, text = failure.server, failure.text
    if any(word in text.lower() for word in ("ssl", "tls", "certificate", "handshake", "verification")):
        return Unreachable(
            f"{server} and this command do not accept each other's certificates, or one of the two speaks plain text: "
            f"both need certificates of one authority, and the server's must name the host of {server} ({text})"
        )
    # A port that is shut, or a name that nobody knows, has nothing to do with certificates.
    shut = any(word in text.lower() for word in ("refused", "resolution"))
    hint = "" if shut else "; if one runs there, it may want certificates, or those of another authority"
    return Unreachable(
        f"no coordinator answers at {server}: start one with `fl-server --config server.toml`, or name its admin "
        f"address with --server{hint} ({text})"
    )


def _silent(failure: Failure) -> OpsError:
    return Unreachable(
        f"{failure.server} did not answer in time: is it the coordinator's admin address, and is it well?"
    )


def _forbidden(failure: Failure) -> OpsError:
    return NotAllowed(
        f"{failure.server} does not allow this: {failure.text}. It wants an admin's certificate, which "
        "`fl ca issue admin NAME` makes"
    )


def _unknown_call(failure: Failure) -> OpsError:
    return Refused(
        f"{failure.server} does not know this call: expected the admin address of a coordinator that is no older than "
        f"this command ({failure.text})"
    )


def _refused(failure: Failure) -> OpsError:
    return Refused(f"{failure.server}: {failure.text or 'no reason was given'} ({failure.code})")


_BY_CODE: dict[str, Callable[[Failure], OpsError]] = {
    "UNAVAILABLE": _unavailable,
    "CANCELLED": _unavailable,
    "DEADLINE_EXCEEDED": _silent,
    "PERMISSION_DENIED": _forbidden,
    "UNAUTHENTICATED": _forbidden,
    "UNIMPLEMENTED": _unknown_call,
    "NOT_FOUND": lambda failure: NotFound(f"{failure.server}: {failure.text}"),
    "INVALID_ARGUMENT": lambda failure: Misused(f"{failure.server}: {failure.text}"),
}
