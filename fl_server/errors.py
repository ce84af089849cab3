"""Errors that end a call with a status.

Each error has its code, and a message of errors.proto with the same facts for programs. Calls that fail with any other
error end with INTERNAL, and only the log has its cause.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from grpc import StatusCode

from fl_common.units import counted, utc
from protos.fl.v1 import coordinator_pb2, errors_pb2, training_pb2


def one_line(text: str, limit: int = 1000) -> str:
    """Foreign text on one line of at most `limit` bytes of UTF-8, without control characters.

    White space becomes a space; any other unprintable character becomes U+FFFD.
    """
    shown = "".join(
        character if character.isprintable() else " " if character.isspace() else "\ufffd" for character in text[:limit]
    )
    return shown.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


def short(came: object) -> str:
    """A foreign value as text that fits into a log line and a status."""
    return one_line(str(came))


def _retry_later(wait_s: float) -> errors_pb2.RetryLater:
    detail = errors_pb2.RetryLater()
    detail.wait.FromTimedelta(timedelta(seconds=wait_s))
    return detail


class ServerError(Exception):
    """A refused call. Its text has what was expected, what came and what to do."""

    code: StatusCode
    detail: Any = None
    """The message of errors.proto with the same facts for programs; each error has its own. None: no message."""
    routine = False
    """Whether the error is part of every restart: it is counted, but not logged for each of ten thousand clients."""
    forbids = False
    """Whether the caller may not do this, and a retry does not help: what it has sent is not kept."""


class InvalidInput(ServerError):
    """A value that no state of the coordinator accepts."""

    code = StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, expected: str, came: object) -> None:
        shown, field = short(came), one_line(field, 200)
        # An error of ours names what it expected itself, and more precisely.
        own = isinstance(came, Exception) and "expected " in shown
        text = shown.removeprefix(f"{field}: ") if own else f"expected {expected}, got {shown}"
        super().__init__(f"{field}: {text}")
        self.field = field
        self.detail = errors_pb2.InvalidField(field=field, expected=expected, came=shown)


class UnknownSessionError(ServerError):
    """The session is not open."""

    code = StatusCode.UNAUTHENTICATED
    routine = True

    def __init__(self) -> None:
        super().__init__("no session of this id is open: register again")
        self.detail = errors_pb2.UnknownSession()


class Fenced(ServerError):
    """A newer session of the identity was opened."""

    code = StatusCode.ABORTED

    def __init__(self, client_id: str, by_other_instance: bool) -> None:
        cause = "another daemon uses the same identity: end one of the two" if by_other_instance else "it reconnected"
        super().__init__(f"a newer session of {client_id!r} is open: {cause}")
        self.detail = errors_pb2.SessionFenced(by_other_instance=by_other_instance)


class Unauthenticated(ServerError):
    """The caller has no identity, or a token that is not accepted. Without a detail: its text is complete."""

    code = StatusCode.UNAUTHENTICATED

    def __init__(self, why: str) -> None:
        super().__init__(f"the caller has no identity: {why}")


class CertificateEnded(ServerError):
    """The certificate of the connection, or the token of the call, has expired.

    Without a detail: a daemon of any version treats that as a lost connection, and connects again with the certificate
    that is then in its files.
    """

    code = StatusCode.UNAUTHENTICATED

    def __init__(self, identity: str, ended: float, source: str = "certificate") -> None:
        when = utc(ended)
        super().__init__(f"the {source} of {identity} ended on {when}: connect again with a renewed one")


class Contested(ServerError):
    """Another daemon works under the identity. The coordinator cannot know which of the two is the right one."""

    code = StatusCode.ABORTED

    def __init__(self, client_id: str, wait_s: float) -> None:
        super().__init__(
            f"another daemon is at work as {client_id!r}: end one of the two, a copied device needs a name, a state "
            f"directory and a certificate of its own; try again in {wait_s:g} s"
        )
        self.detail = _retry_later(wait_s)


class NoCommonProtocol(ServerError):
    """Two ranges of protocol versions that do not overlap."""

    code = StatusCode.FAILED_PRECONDITION
    detail: errors_pb2.ProtocolMismatch

    def __init__(self, client: tuple[int, int], server: tuple[int, int]) -> None:
        older = "client" if client[1] < server[0] else "coordinator"
        super().__init__(
            f"no protocol version in common: the client supports {client[0]} to {client[1]}, the coordinator "
            f"{server[0]} to {server[1]}; upgrade the {older}"
        )
        self.detail = errors_pb2.ProtocolMismatch(
            client=coordinator_pb2.ProtocolRange(min=client[0], max=client[1]),
            server=coordinator_pb2.ProtocolRange(min=server[0], max=server[1]),
        )
        self.detail.time.FromSeconds(int(time.time()))


class Forbidden(ServerError):
    """The caller may not do this. A retry does not help."""

    code = StatusCode.PERMISSION_DENIED
    forbids = True

    def __init__(self, identity: str, needed: str, roles: Sequence[str] = ()) -> None:
        """roles: of which the caller needs one; empty where another role would not help."""
        super().__init__(f"{identity or 'a caller without certificate'} is not allowed to do this; needed: {needed}")
        self.detail = errors_pb2.NotAllowed(identity=identity, needed=needed, roles=roles)


class Revoked(Forbidden):
    """The caller's certificate is revoked. It stays so."""

    def __init__(self, identity: str, why: str) -> None:
        super().__init__(identity, f"a certificate that is not revoked ({why}): enroll again with a new key")
        self.detail.revoked = True


class NotEnrolled(Forbidden):
    """A refused request for a certificate."""

    def __init__(self, why: str, needed: str, identity: str = "") -> None:
        """why: one word for metrics: "token", "used", "expired", "revoked", "name", "csr"."""
        super().__init__(identity, needed)
        self.why = why


class NotConfigured(ServerError):
    """A part of the coordinator that its settings leave out."""

    code = StatusCode.FAILED_PRECONDITION

    def __init__(self, what: str, settings: str) -> None:
        super().__init__(f"{what} is off on this coordinator: set {settings} in its server.toml")


class NoSuchResource(ServerError):
    """A bundle that is not available."""

    code = StatusCode.NOT_FOUND

    def __init__(self, digest: str) -> None:
        super().__init__(f"no resource {digest} is being sent out: its round is over; wait for a new assignment")
        self.detail = errors_pb2.UnknownResource()


class NoSuchRun(ServerError):
    """No run of that id."""

    code = StatusCode.NOT_FOUND

    def __init__(self, run_id: str, what: str = "") -> None:
        super().__init__(what or f"no run {short(run_id)!r}; `fl run list` shows those there are")
        self.detail = errors_pb2.UnknownRun(run_id=short(run_id))


class NoSuchModel(ServerError):
    """The checkpoint of a committed round was removed. Without a detail: its text is complete."""

    code = StatusCode.NOT_FOUND

    def __init__(self, run_id: str, round_: int, kept: Iterable[int]) -> None:
        rounds = ", ".join(str(round_) for round_ in kept if round_ >= 0)
        which = "first model" if round_ < 0 else f"model of round {round_}"
        instead = f"one of the rounds {rounds}, or " if rounds else ""
        super().__init__(
            f"run {run_id!r} has no {which} any more, because older checkpoints are removed "
            f'(keep_checkpoints): take {instead}"latest" or "best"'
        )


class NoBestRound(ServerError):
    """No round of the run is the best one. Without a detail: its text is complete."""

    code = StatusCode.NOT_FOUND

    def __init__(self, run_id: str, metric: str, reported: Iterable[str]) -> None:
        names = ", ".join(sorted(reported)[:20]) or "none"
        super().__init__(
            f"run {run_id!r} has no best round: no evaluation so far has a finite {metric!r}, its metric (stop.metric);"
            f' metrics reported: {names}; take "latest" or a round'
        )


class TooFewUpdates(ServerError):
    """A model is made of fewer updates than its caller may see. Without a detail: its text is complete."""

    code = StatusCode.PERMISSION_DENIED

    def __init__(self, run_id: str, round: int, accepted: int, least: int) -> None:
        super().__init__(
            f"round {round} of run {run_id!r} has {counted(accepted, 'update')}, and its model would reveal "
            "them: expected at "
            f"least {least} for an operator who is no admin (rounds.min_accepted of the coordinator); take another "
            "round, or ask an admin"
        )


class RunExists(ServerError):
    """The name is taken."""

    code = StatusCode.ALREADY_EXISTS

    def __init__(self, run_id: str, *, deleted: bool = False) -> None:
        why = "was deleted, and ids are not used again" if deleted else "exists already"
        super().__init__(f"a run {run_id!r} {why}; choose another name")
        self.detail = errors_pb2.UnknownRun(run_id=run_id)


class NoSuchClient(ServerError):
    """No client of that id has registered."""

    code = StatusCode.NOT_FOUND

    def __init__(self, client_id: str) -> None:
        client_id = short(client_id)
        super().__init__(f"no client {client_id!r} has registered; `fl clients list` shows those that have")
        self.detail = errors_pb2.UnknownClient(client_id=client_id)


class NoSuchRelease(ServerError):
    """No release of that name, or not of that version. Without a detail: its text is complete."""

    code = StatusCode.NOT_FOUND

    def __init__(self, name: str, version: int = 0, noun: str = "model") -> None:
        which = f"version {version} of {short(name)!r}" if version else f"release of a {noun} {short(name)!r}"
        command = "fl release" if noun == "model" else "fl packages"
        super().__init__(f"no {which}; `{command} list` shows those there are")


class WrongRelease(ServerError):
    """The release cannot do this now. Without a detail: its text is complete."""

    code = StatusCode.FAILED_PRECONDITION


class NoSuchToken(ServerError):
    """No enrollment token of that id. Without a detail: its text is complete."""

    code = StatusCode.NOT_FOUND

    def __init__(self, token_id: str) -> None:
        super().__init__(f"no enrollment token {short(token_id)[:16]!r}; `fl enroll list` shows those there are")


class NoSuchService(ServerError):
    """No service of that name has a health check."""

    code = StatusCode.NOT_FOUND
    routine = True

    def __init__(self, name: str, known: Sequence[str]) -> None:
        names = ", ".join(repr(name) for name in known)
        super().__init__(f"service: expected one of {names}, got {name[:100]!r}")


class WrongState(ServerError):
    """The run cannot do this in its state."""

    code = StatusCode.FAILED_PRECONDITION

    def __init__(self, run_id: str, state: str, allowed: Sequence[str], what: str) -> None:
        super().__init__(f"run {run_id!r} is {state}; {what} needs it to be {' or '.join(allowed)}")
        self.detail = errors_pb2.WrongRunState(run_id=run_id, state=state, allowed_states=allowed)


class RunBroke(ServerError):
    """A command of the run failed during this request, and the run failed with it."""

    code = StatusCode.FAILED_PRECONDITION

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(
            f"run {run_id!r} failed during this: {reason}; `fl run resume {run_id}` continues from its last committed "
            "model"
        )
        self.detail = errors_pb2.WrongRunState(run_id=run_id, state="failed", allowed_states=("running",))


class UploadBroken(ServerError):
    """The bytes of an upload do not match its header; resume at `kept_bytes`."""

    code = StatusCode.DATA_LOSS

    def __init__(self, key: training_pb2.ExchangeKey, kept_bytes: int, why: str) -> None:
        super().__init__(f"{why}; {kept_bytes} bytes are kept: query the upload and resume there")
        self.kept_bytes = kept_bytes
        self.detail = errors_pb2.BrokenUpload(key=key, kept_bytes=kept_bytes)


class NotNow(ServerError):
    """The same call may succeed later."""

    code = StatusCode.UNAVAILABLE

    def __init__(self, why: str, wait_s: float, *, routine: bool = False) -> None:
        super().__init__(f"{why}; try again in {wait_s:g} s")
        self.routine = routine
        self.detail = _retry_later(wait_s)


class LimitExceeded(ServerError):
    """A limit of one client; the same call may succeed later."""

    code = StatusCode.RESOURCE_EXHAUSTED
    routine = True

    def __init__(self, expected: str, wait_s: float) -> None:
        """expected: the most that is allowed, with the setting's name."""
        super().__init__(f"limit of one client exceeded: expected at most {expected}; try again in {wait_s:.3g} s")
        self.detail = _retry_later(wait_s)


class TooMany(ServerError):
    """Too many open calls of the caller, or of the port; the same call may succeed later."""

    code = StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, why: str, wait_s: float, *, routine: bool = False) -> None:
        super().__init__(f"{why}; try again in {wait_s:g} s")
        self.routine = routine
        self.detail = _retry_later(wait_s)


class Relayed(ServerError):
    """The status with which the coordinator ended a call that a worker made for a client."""

    routine = True
    """The coordinator has logged it."""

    def __init__(self, code: StatusCode, text: str, detail: Any) -> None:
        """detail: a message of errors.proto, or None."""
        super().__init__(text)
        self.code, self.detail = code, detail
        self.forbids = isinstance(detail, errors_pb2.NotAllowed)


def model_of(round_: int) -> str:
    """A model by its round, in messages; -1 is the model before round 0."""
    return f"the model of round {round_}" if round_ >= 0 else "the first model"
