"""What can go wrong at the caller's side of the wire, as one tree.

    ServerError
    |- InvalidInput        a value that no state of the coordinator would accept
    |- UnknownSessionError  register again
    |- CertificateEnded    connect anew, with a certificate that is valid
    |- Fenced              a newer session of the same identity is open
    |- Contested           an older session of the same identity is at work: come again later
    |- NoCommonProtocol    upgrade the older side
    |- Forbidden           the certificate or the ban list says no
    |- NoSuchResource      not sent out any more
    |- NoSuchRun, RunExists
    |- NoSuchClient
    |- NoSuchService       of a probe
    |- WrongState          not from this state of the run
    |- UploadBroken        the bytes are not what was announced
    |- LimitExceeded       more than one client may have: try again after a while
    |- TooMany             the caller has too much open, or the port has
    '- NotNow              try again after a while

Each error carries the message of errors.proto that tells a program what a person reads in the text. `interceptors.py`
turns it into a status in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from google.protobuf.message import Message

from protos.fl.v1 import coordinator_pb2, errors_pb2, training_pb2


def one_line(text: str, limit: int = 1000) -> str:
    """Text from others on one line of at most `limit` bytes of UTF-8, without anything that steers a terminal.

    White space becomes a space, any other character that is not printed U+FFFD.
    """
    shown = "".join(each if each.isprintable() else " " if each.isspace() else "\ufffd" for each in text[:limit])
    return shown.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


def short(came: object) -> str:
    """What others sent, in words that fit into a log line and a status."""
    return one_line(str(came))


class ServerError(Exception):
    """A call that is refused. `str()` says what was expected, what came and what to do."""

    detail: Message | None = None
    routine = False
    """Part of every restart: counted like all, but no line in the log for each of ten thousand clients."""


class InvalidInput(ServerError):
    """A field whose value no state would accept."""

    def __init__(self, field: str, expected: str, came: object) -> None:
        shown, field = short(came), one_line(field, 200)
        super().__init__(f"{field}: expected {expected}, got {shown}")
        self.field = field
        self.detail = errors_pb2.InvalidField(field=field, expected=expected, came=shown)


class UnknownSessionError(ServerError):
    """The session is not open."""

    routine = True

    def __init__(self) -> None:
        super().__init__("no session of this id is open: register again")
        self.detail = errors_pb2.UnknownSession()


class Fenced(ServerError):
    """A newer session of the identity was opened."""

    def __init__(self, client_id: str, by_other_instance: bool) -> None:
        cause = "another daemon uses the same identity: end one of the two" if by_other_instance else "it reconnected"
        super().__init__(f"a newer session of {client_id!r} is open: {cause}")
        self.detail = errors_pb2.SessionFenced(by_other_instance=by_other_instance)


class CertificateEnded(ServerError):
    """The certificate that the connection was made with is not valid any more.

    Without a detail: a daemon of any version takes that for a lost connection, and makes the next one with the
    certificate that lies in its files then.
    """

    def __init__(self, identity: str, ended: float) -> None:
        when = f"{datetime.fromtimestamp(ended, UTC):%Y-%m-%d %H:%M:%S} UTC"
        super().__init__(f"the certificate of {identity} ended on {when}: connect anew, with one that was renewed")


class Contested(ServerError):
    """Another daemon works under the identity; which of the two is the right one, the coordinator cannot know."""

    def __init__(self, client_id: str, wait_s: float) -> None:
        super().__init__(
            f"another daemon is at work as {client_id!r}: end one of the two, a copied device needs a name, a state "
            f"directory and a certificate of its own; try again in {wait_s:g} s"
        )
        self.detail = errors_pb2.RetryLater()
        self.detail.wait.FromTimedelta(timedelta(seconds=wait_s))


class NoCommonProtocol(ServerError):
    """Two ranges of protocol versions that do not overlap."""

    def __init__(self, client: tuple[int, int], server: tuple[int, int]) -> None:
        older = "client" if client[1] < server[0] else "coordinator"
        super().__init__(
            f"no protocol version in common: the client speaks {client[0]} to {client[1]}, the coordinator {server[0]} "
            f"to {server[1]}; upgrade the {older}"
        )
        self.detail = errors_pb2.ProtocolMismatch(
            client=coordinator_pb2.ProtocolRange(min=client[0], max=client[1]),
            server=coordinator_pb2.ProtocolRange(min=server[0], max=server[1]),
        )


class Forbidden(ServerError):
    """The caller may not do this; retrying does not help."""

    def __init__(self, identity: str, needed: str) -> None:
        super().__init__(f"{identity or 'a caller without certificate'} is not allowed to do this; needed: {needed}")
        self.detail = errors_pb2.NotAllowed(identity=identity, needed=needed)


class NoSuchResource(ServerError):
    """A bundle that is not sent out any more."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"no resource {digest} is being sent out: its round is over; wait for a new assignment")
        self.detail = errors_pb2.UnknownResource()


class NoSuchRun(ServerError):
    """No run of that id."""

    def __init__(self, run_id: str, what: str = "") -> None:
        super().__init__(what or f"no run {short(run_id)!r}; `fl run list` shows those there are")
        self.detail = errors_pb2.UnknownRun(run_id=short(run_id))


class RunExists(ServerError):
    """The name is taken."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"a run {run_id!r} exists already; choose another name")
        self.detail = errors_pb2.UnknownRun(run_id=run_id)


class NoSuchClient(ServerError):
    """No client of that name ever registered."""

    def __init__(self, client_id: str) -> None:
        client_id = short(client_id)
        super().__init__(f"no client {client_id!r} has registered; `fl clients list` shows those that have")
        self.detail = errors_pb2.UnknownClient(client_id=client_id)


class NoSuchService(ServerError):
    """No service of that name is watched by probes."""

    routine = True

    def __init__(self, name: str, known: Sequence[str]) -> None:
        names = ", ".join(repr(each) for each in known)
        super().__init__(f"service: expected one of {names}, got {name[:100]!r}")


class WrongState(ServerError):
    """The run cannot do this from the state it is in."""

    def __init__(self, run_id: str, state: str, allowed: Sequence[str], what: str) -> None:
        super().__init__(f"run {run_id!r} is {state}; {what} needs it to be {' or '.join(allowed)}")
        self.detail = errors_pb2.WrongRunState(run_id=run_id, state=state, allowed_states=allowed)


class UploadBroken(ServerError):
    """The bytes of an upload are not what was announced; resume at `kept_bytes`."""

    def __init__(self, key: training_pb2.ExchangeKey, kept_bytes: int, why: str) -> None:
        super().__init__(f"{why}; {kept_bytes} bytes are kept: query the upload and resume there")
        self.detail = errors_pb2.BrokenUpload(key=key, kept_bytes=kept_bytes)


class NotNow(ServerError):
    """Not now; the same call may succeed after a while."""

    def __init__(self, why: str, wait_s: float, *, routine: bool = False) -> None:
        super().__init__(f"{why}; try again in {wait_s:g} s")
        self.routine = routine
        self.detail = errors_pb2.RetryLater()
        self.detail.wait.FromTimedelta(timedelta(seconds=wait_s))


class LimitExceeded(ServerError):
    """One client wants more than its share; the same call may succeed after a while."""

    routine = True

    def __init__(self, expected: str, wait_s: float) -> None:
        """expected: the most that is allowed, with the setting's name."""
        super().__init__(f"limit of one client exceeded: expected at most {expected}; try again in {wait_s:.3g} s")
        self.detail = errors_pb2.RetryLater()
        self.detail.wait.FromTimedelta(timedelta(seconds=wait_s))


class TooMany(ServerError):
    """A limit on what is open at once; the same call may succeed after a while."""

    def __init__(self, why: str, wait_s: float, *, routine: bool = False) -> None:
        super().__init__(f"{why}; try again in {wait_s:g} s")
        self.routine = routine
        self.detail = errors_pb2.RetryLater()
        self.detail.wait.FromTimedelta(timedelta(seconds=wait_s))
