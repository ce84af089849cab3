"""What the listening ports are made with: limits on connections, streams and sizes that the transport itself keeps.

What grpc does about each was measured with the version in constraints.txt: a connection over the limit is closed when
it is accepted; one that has not finished TLS and the first HTTP/2 frames in time is closed, in plain text too; headers
and messages over their limits end the call with RESOURCE_EXHAUSTED before any of our code runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from fl_server.config import ServerConfig
from fl_server.open_files import Connections
from fl_server.rpc.requests import LARGEST_ADMIN_BYTES, LARGEST_PROBE_BYTES
from protos.wire import MAX_MESSAGE_BYTES, ChannelOptions, server_options

METADATA_BYTES = 8 << 10
"""Headers of a call; what tracing adds takes some hundred bytes."""
PROBE_STREAMS = 8
PROBE_AGE_S = 60.0
"""A connection to the health port is asked to go after that: a stranger must come again to hold one of few."""
CALLS_PER_CLIENT = 4
"""Open at once by a client on average: it attends, and fetches or sends. Beside them stand those of newcomers."""
CALLS_BESIDE = 256


@dataclass(frozen=True, slots=True)
class Port:
    """What one listening port takes."""

    message_bytes: int
    """Largest message that is received."""
    connections: int
    streams: int
    """Calls at once on one connection."""
    calls: int
    """Calls at once on all of them."""
    handshake_s: float
    idle_s: float
    """A connection without a call is asked to go after that."""
    age_s: float | None = None
    """Any connection is asked to go after that."""

    def options(self) -> ChannelOptions:
        """Arguments of the server that listens there."""
        own = {
            "grpc.max_receive_message_length": self.message_bytes,
            "grpc.max_allowed_incoming_connections": self.connections,
            "grpc.max_concurrent_streams": self.streams,
            "grpc.server_handshake_timeout_ms": _milliseconds(self.handshake_s),
            "grpc.max_connection_idle_ms": _milliseconds(self.idle_s),
            "grpc.max_metadata_size": METADATA_BYTES,
            "grpc.absolute_max_metadata_size": METADATA_BYTES,
        }
        if self.age_s is not None:
            own["grpc.max_connection_age_ms"] = _milliseconds(self.age_s)
            own["grpc.max_connection_age_grace_ms"] = _milliseconds(self.handshake_s)
        return tuple({**dict(server_options()), **own}.items())


def ports(config: ServerConfig, connections: Connections) -> dict[str, Port]:
    """Of a coordinator, by the settings' names."""
    limits = config.connections
    streams, times = limits.calls_per_client, (limits.handshake_s, limits.idle_s)
    calls = CALLS_PER_CLIENT * config.limits.max_clients + CALLS_BESIDE
    return {
        "listen": Port(MAX_MESSAGE_BYTES, connections.clients, streams, calls, *times),
        "admin_listen": Port(LARGEST_ADMIN_BYTES, connections.admin, streams, 4 * connections.admin, *times),
        "health_listen": Port(
            LARGEST_PROBE_BYTES, connections.health, PROBE_STREAMS, 2 * connections.health, *times, age_s=PROBE_AGE_S
        ),
    }


def _milliseconds(seconds: float) -> int:
    return max(1, round(1000 * seconds))
