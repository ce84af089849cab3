"""Everything that can go wrong in the daemon, as one tree.

ClientError
├── StartError            the daemon cannot start; the message says what to change
│   ├── ConfigError       the configuration file
│   ├── StateError        the state directory
│   └── DeviceError       the device that was asked for
├── WorkFailed            one assignment cannot be done; the coordinator is told why
└── TransportError        one call failed
    ├── Unreachable       no answer: coordinator away, link cut, handshake failed; try again
    │   └── Contested     another daemon of the same identity is at work; try again later
    ├── SessionLost       the coordinator does not know the session; register again
    ├── Fenced            a newer session of the same identity is open
    ├── ProtocolMismatch  no protocol version in common
    ├── NotAllowed        certificate or ban list forbids it
    ├── ResourceGone      a resource that is no longer sent out
    ├── BrokenTransfer    bytes that are not what their checksum says; go on from what is good
    └── Refused           the coordinator will never take this request
"""

from __future__ import annotations

from protos.fl.v1 import coordinator_pb2


class ClientError(Exception):
    """Any failure that the daemon knows by name."""


class StartError(ClientError):
    """The daemon cannot start; the message says what was expected, what came, and what to change."""


class ConfigError(StartError):
    """The configuration file is missing, is not TOML, or says something that cannot be."""


class StateError(StartError):
    """The state directory is held by another daemon, belongs to another device, or cannot be written."""


class DeviceError(StartError):
    """The device that was asked for is not there."""


class WorkFailed(ClientError):
    """One assignment cannot be done; goes to the coordinator as a WorkFailure."""

    def __init__(self, reason: coordinator_pb2.FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TransportError(ClientError):
    """One call failed. wait: seconds that the coordinator asked to wait before the next try, None if it did not."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class Unreachable(TransportError):
    """No answer: the coordinator is away, the link was cut, the handshake failed, or it said "later"."""


class Contested(Unreachable):
    """Another daemon of the same identity is at work, and this one is to come again later."""


class SessionLost(TransportError):
    """The coordinator does not know the session: register again."""


class Fenced(TransportError):
    """A newer session of the same identity is open."""

    def __init__(self, message: str, by_other_instance: bool) -> None:
        super().__init__(message)
        self.by_other_instance = by_other_instance


class ProtocolMismatch(TransportError):
    """No protocol version in common. spoken: the coordinator's oldest and newest."""

    def __init__(self, message: str, spoken: tuple[int, int] = (0, 0)) -> None:
        super().__init__(message)
        self.spoken = spoken


class NotAllowed(TransportError):
    """The certificate or the ban list forbids it."""


class ResourceGone(TransportError):
    """A resource that is no longer sent out."""


class BrokenTransfer(TransportError):
    """Bytes that are not what their offset or checksum says: go on from what is good."""


class Refused(TransportError):
    """The coordinator will never take this request."""
