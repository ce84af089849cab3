"""All errors of the daemon, as one tree.

ClientError
├── UsageError            a set-up command cannot do what its arguments ask for
├── StartError            the daemon cannot start; the message names the change that is needed
│   ├── ConfigError       the configuration file
│   ├── StateError        the state directory
│   └── DeviceError       the configured device
├── WorkFailed            one assignment failed; the coordinator gets the reason
│   └── PolicyRefused     the site's policy refuses it
└── TransportError        one call failed
    ├── Unreachable       no answer: coordinator down, connection cut, handshake failed; retry
    │   ├── Contested     another daemon uses the same identity; retry later
    │   └── FailedCall    the coordinator failed in the call; retry a few times
    ├── InvalidCertificate  no connection, and this device's certificate has ended or is not valid yet
    ├── SessionLost       the coordinator does not know the session; register again
    │   └── PolicyChanged  this device's own policy changed; register again by its rules
    ├── Fenced            a newer session of the same identity is open
    ├── ProtocolMismatch  no protocol version in common
    ├── Untrusted         the site's policy does not allow this coordinator; nothing is sent to it
    ├── NotAllowed        the certificate or the ban list forbids it
    ├── ResourceGone      the coordinator no longer sends this resource
    ├── BrokenTransfer    damaged bytes; resume after the last good ones
    ├── UnusableCertificate  the coordinator issued a certificate that this device cannot use
    ├── GivenUp           the coordinator failed in every try of a call
    └── Refused           the coordinator will never accept this request
"""

from __future__ import annotations

from dataclasses import dataclass

from protos.fl.v1 import coordinator_pb2


class ClientError(Exception):
    """Base of all errors of the daemon."""


class UsageError(ClientError):
    """A set-up command cannot do what its arguments ask for. The message names what was expected, and what to do."""


class StartError(ClientError):
    """The daemon cannot start. The message names what was expected, what was found, and what to change."""


class ConfigError(StartError):
    """The configuration file is missing, is not TOML, or has an invalid value."""


class StateError(StartError):
    """The state directory is held by another daemon, belongs to another device, or cannot be written."""


class DeviceError(StartError):
    """The configured device does not exist."""


@dataclass(frozen=True, slots=True)
class Raised:
    """What the task's own code raised."""

    error_type: str
    """The exception's type."""
    place: str
    """Its line, as in "mine.py, line 3, in loss"; empty if no line of the task's own took part."""
    traceback: str
    """The lines from the first frame that is the task's; empty without one."""


class WorkFailed(ClientError):
    """One assignment failed. The coordinator gets a WorkFailure."""

    def __init__(self, reason: coordinator_pb2.FailureReason, message: str, raised: Raised | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.raised = raised


def unsupported(message: str) -> WorkFailed:
    """This device cannot do what the assignment asks for."""
    return WorkFailed(coordinator_pb2.FAILURE_REASON_UNSUPPORTED, message)


def beyond_limits(message: str) -> WorkFailed:
    """The assignment needs more than this device has, or its owner allows."""
    return WorkFailed(coordinator_pb2.FAILURE_REASON_RESOURCES, message)


def other_layout(message: str) -> WorkFailed:
    """The coordinator's model has other tensors than the model here."""
    return WorkFailed(coordinator_pb2.FAILURE_REASON_LAYOUT, message)


def state_lost(message: str) -> WorkFailed:
    """The client state that the assignment continues from is not here."""
    return WorkFailed(coordinator_pb2.FAILURE_REASON_STATE_LOST, message)


def not_finite(message: str) -> WorkFailed:
    """A value of the result is NaN or infinite."""
    return WorkFailed(coordinator_pb2.FAILURE_REASON_NOT_FINITE, message)


def task_error(message: str) -> WorkFailed:
    """The task's code, or the process that it runs in, failed."""
    return WorkFailed(coordinator_pb2.FAILURE_REASON_TASK_ERROR, message)


class PolicyRefused(WorkFailed):
    """The policy of the device's site refuses an assignment. rule: one of policy.rules.RULES."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(coordinator_pb2.FAILURE_REASON_POLICY, f"policy: {rule}: {message}")
        self.rule = rule


class TransportError(ClientError):
    """One call failed. wait: seconds that the coordinator requests before the next try, or None."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class Unreachable(TransportError):
    """No answer: the coordinator is down, the connection was cut, the handshake failed, or a wait was requested."""


class Contested(Unreachable):
    """Another daemon uses the same identity. This one retries later."""


class FailedCall(Unreachable):
    """The coordinator answers, and fails in this call: INTERNAL, for example. A few more tries may help."""


class InvalidCertificate(TransportError):
    """No connection, and this device's certificate has ended or is not valid yet. A new one helps, or a right clock."""

    def __init__(self, message: str, todo: str, *, ended: bool) -> None:
        super().__init__(message)
        self.todo = todo
        self.ended = ended
        """False: it is not valid yet, and becomes so by itself or with the right time."""


class UnusableCertificate(TransportError):
    """The coordinator issued a certificate that is for another key or holder, or cannot be parsed."""


class SessionLost(TransportError):
    """The coordinator does not know the session: register again."""


class PolicyChanged(SessionLost):
    """The site's policy changed while the session was open: what is registered may be against its rules."""


class Untrusted(TransportError):
    """The policy of the device's site does not allow this coordinator."""


class Fenced(TransportError):
    """A newer session of the same identity is open."""

    def __init__(self, message: str, by_other_instance: bool) -> None:
        super().__init__(message)
        self.by_other_instance = by_other_instance


class ProtocolMismatch(TransportError):
    """No protocol version in common."""

    def __init__(
        self, message: str, supported: tuple[int, int] = (0, 0), clocks: str = "", versions: tuple[str, str] = ("", "")
    ) -> None:
        """supported: the coordinator's oldest and newest. clocks: how its clock differs from this one's, if it does.

        versions: of the coordinator's software, and the newest that one of its runs requires; empty: not known, none.
        """
        super().__init__(message)
        self.supported, self.clocks, self.versions = supported, clocks, versions


class NotAllowed(TransportError):
    """The certificate or the ban list forbids it."""


class Revoked(NotAllowed):
    """This device's certificate is revoked. A new one for a new key helps."""


class ResourceGone(TransportError):
    """The coordinator no longer sends this resource."""


class BrokenTransfer(TransportError):
    """Bytes with a wrong offset or checksum. The transfer resumes after the last good ones."""


class GivenUp(TransportError):
    """The coordinator failed in every try of a call. It may have acted on one of them."""


class Refused(TransportError):
    """The coordinator will never accept this request."""
