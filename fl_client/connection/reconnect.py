"""When a device connects again: another address, certificate or session, and the wait after an error."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import replace

import structlog

from fl_client import errors
from fl_client.connection.link import Backoff, RetryDelays
from fl_client.connection.transport import GrpcTransport
from fl_common.rate_limits import RateLimiter
from protos.fl.v1 import coordinator_pb2 as pb


class Endpoint(ABC):
    """The coordinator's addresses, how to connect to it, and what a registration there says."""

    def __init__(self, server: str, *standbys: str) -> None:
        """standbys: addresses of coordinators that may lead in place of the first one."""
        self._addresses = (server, *standbys)
        self._failures = 0

    @property
    def server(self) -> str:
        """The address that is tried now, or that has answered."""
        return self._addresses[self._failures % len(self._addresses)]

    def try_next(self) -> bool:
        """The address did not answer. Returns whether another one is to be tried before a wait."""
        self._failures += 1
        return self._failures % len(self._addresses) > 0

    @abstractmethod
    def connect(self) -> GrpcTransport:
        """A new connection. Nothing is sent before its first call."""

    @abstractmethod
    def registration(self) -> pb.RegisterRequest:
        """This daemon's registration as it is now, without updates and states."""

    async def renewed(self) -> None:
        """Wait until a new connection is needed although the current one works.

        Raises PolicyChanged for a new session.
        """
        await asyncio.get_running_loop().create_future()

    def explained(self, error: errors.TransportError) -> errors.TransportError:
        """The error of a connection without an answer, or the cause of it that this device knows."""
        return error

    def accept(self, response: pb.RegisterResponse) -> None:
        """Raises Untrusted for a coordinator that this device must not work for."""
        del response


log = structlog.get_logger()

CONNECTIONS_PER_S, CONNECTION_BURST = 0.5, 30
"""Limit of new connections, whatever the coordinator answers."""

MAX_BLOCKED = 10
"""Times `RetryDelays.blocked`, between two tries of a daemon that is refused again and again."""

NEEDS_A_PERSON = (errors.ProtocolMismatch, errors.NotAllowed, errors.Untrusted, errors.Refused, errors.StartError)
"""Errors that no retry alone can repair."""


class ReconnectPolicy:
    """The waits between connections. Each kind of error has its own backoff."""

    def __init__(self, delays: RetryDelays) -> None:
        self._backoff = Backoff(delays)
        self._blocked = Backoff(RetryDelays(first=delays.blocked, longest=MAX_BLOCKED * delays.blocked))
        self._fenced_delays = replace(delays, first=delays.longest, longest=MAX_BLOCKED * delays.blocked)
        self._fenced = Backoff(self._fenced_delays)
        self._connections = RateLimiter(CONNECTIONS_PER_S, CONNECTION_BURST)

    def attached(self) -> None:
        """A stream is open: the next waits are short again."""
        self._backoff.reset()
        self._blocked.reset()

    def limit(self, wait: float) -> float:
        """The wait, or a longer one that keeps to the limit of new connections."""
        return max(wait, self._connections.delay())

    def after_end(self, requested: float | None = None) -> float:
        """Seconds to wait after a stream that the coordinator ended, or an error of the daemon itself."""
        return self._backoff.after(requested)

    def after(self, error: errors.ClientError, attended_s: float, *, was_registered: bool) -> float:
        """Seconds to wait after an error. Errors that need a person are logged with what to do.

        attended_s: duration of the connection. was_registered: whether it began with a known session.
        """
        if isinstance(error, errors.Fenced) and error.by_other_instance:
            return self._after_fence(attended_s, error)
        if isinstance(error, errors.SessionLost | errors.Fenced):
            if was_registered:
                self._backoff.reset()  # the coordinator is back and only needs a new registration
            return self._backoff.next()
        if isinstance(error, NEEDS_A_PERSON):
            log.error(
                "refused", reason=str(error), todo=next(todo for kind, todo in _TODO.items() if isinstance(error, kind))
            )
            return self._blocked.next()
        if isinstance(error, errors.InvalidCertificate):
            log.error("certificate_invalid", reason=str(error), todo=error.todo)
            if error.ended:
                return self._blocked.next()
        if isinstance(error, errors.Contested):
            log.error("identity_in_use", reason=str(error), todo=_TWO_DAEMONS)
        return self._backoff.after(error.wait if isinstance(error, errors.TransportError) else None)

    def _after_fence(self, attended_s: float, error: errors.Fenced) -> float:
        """Another daemon opened a newer session. An immediate reconnect would fence it in turn, without end.

        After a long session the waits start from the shortest again.
        """
        if attended_s > self._fenced_delays.longest:
            self._fenced.reset()
        log.error("fenced", reason=str(error), todo=_TWO_DAEMONS)
        return self._fenced.next()


_TWO_DAEMONS = (
    "two daemons use one identity: end one of them; a copied device needs a client_id, a state_dir and a certificate "
    "of its own. This daemon retries meanwhile, with growing waits"
)
_TODO: dict[type[errors.ClientError], str] = {
    errors.ProtocolMismatch: "upgrade the older side; this daemon retries meanwhile",
    errors.Revoked: "ask the coordinator's operator for a token (`fl enroll create --name NAME`): with it `fl-client"
    " init` gets a certificate, which this daemon uses without a restart",
    errors.NotAllowed: "ask the coordinator's operator: the identity is banned, or the certificate is not for it",
    errors.Untrusted: "correct server, tls.ca or the policy file; this daemon retries meanwhile",
    errors.StartError: "restore the file; this daemon retries meanwhile",
    errors.Refused: "compare this daemon's configuration and version with the coordinator's",
}
