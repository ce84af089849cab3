"""The transport's limits of each listening port: connections, streams, sizes and times.

The effects were measured with the grpc version in constraints.txt. A connection over the limit is closed when it is
accepted. One that does not finish TLS and the first HTTP/2 frames in time is closed, in plain text too. Headers and
messages over their limits end the call with RESOURCE_EXHAUSTED before our code runs.

A connection is an open file, and so are the ledger, a checkpoint that is written, and the two files of an update that
is received. Connections get a share; the rest is reserved for files that must not fail.
"""

from __future__ import annotations

import resource
from collections.abc import Collection
from dataclasses import dataclass

import structlog

from fl_server.rpc.methods import ADMIN, largest_request
from fl_server.settings.config import ServerConfig
from fl_server.settings.sections import ConnectionsConfig
from protos.wire import AHEAD_BYTES, MAX_MESSAGE_BYTES, ChannelOptions, server_options

log = structlog.get_logger()

OWN_FILES = 64
"""Open files of an idle coordinator: 45 were measured."""
MOST_KEPT = 4096
"""Largest reserve for files: 2,000 updates at once."""
MOST = 1 << 20
"""Used where the process has no limit."""
METADATA_BYTES = 8 << 10
"""Largest headers of a call; tracing adds some hundred bytes."""
PROBE_STREAMS = 8
PROBE_AGE_S = 60.0
"""A connection to a port for callers without a name is closed after this time: no peer can occupy the few there are."""
CALLS_PER_CLIENT = 4
"""Open calls of a client on average: it attends, and fetches or uploads."""
EXTRA_CALLS = 256
"""Open calls beyond these: of clients that register."""
WEB_CALLS = 2048
"""Open calls of the web process for all browsers."""
LARGEST_WEB_BYTES = 64 << 10
"""The largest request of the web process."""


@dataclass(frozen=True, slots=True)
class Connections:
    """Connections at once, by port."""

    clients: int
    admin: int
    health: int
    metrics: int
    enrollment: int = 0
    """0: the port is off."""


def allow_open_files(clients: int, wanted: ConnectionsConfig, also: Collection[str] = ()) -> Connections:
    """Raise the process's soft limit to its hard limit, divide it, and log a warning if it is too low.

    also: settings of the ports that are on beside the usual ones: "enroll_listen", "token_listen".
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = MOST if hard == resource.RLIM_INFINITY else hard
    shared = share(limit, clients, wanted, also)
    if shared.clients < clients:
        todo = "raise LimitNOFILE (systemd) or `ulimit -Hn`, or lower limits.max_clients"
        log.warning("few_open_files", limit=limit, connections=shared.clients, max_clients=clients, todo=todo)
    return shared


def share(limit: int, clients: int, wanted: ConnectionsConfig, also: Collection[str] = ()) -> Connections:
    """Connections for each port of a process that may open `limit` files.

    There are an eighth more than clients: a client may have two connections while its certificate is renewed.
    """
    admin, health = (min(asked, max(4, limit // 16)) for asked in (wanted.admin, wanted.health))
    metrics = min(wanted.metrics, max(4, limit // 32))
    operators = 2 * admin if "token_listen" in also else admin
    enrollment = min(wanted.enrollment, max(4, limit // 16)) if "enroll_listen" in also else 0
    left = limit - OWN_FILES - min(MOST_KEPT, limit // 4) - operators - health - metrics - enrollment
    return Connections(max(4, min(clients + clients // 8 + 64, left)), admin, health, metrics, enrollment)


@dataclass(frozen=True, slots=True)
class Port:
    """The limits of one listening port."""

    message_bytes: int
    """Largest message that is accepted."""
    connections: int
    streams: int
    """Calls at once on one connection."""
    calls: int
    """Calls at once on all connections."""
    handshake_s: float
    idle_s: float
    """A connection without a call is closed after this time."""
    ahead_bytes: int = AHEAD_BYTES
    """Bytes that one call may send before they are read."""
    age_s: float | None = None
    """Every connection is closed after this time."""

    def options(self) -> ChannelOptions:
        """The grpc options of the port's server."""
        own = {
            "grpc.max_receive_message_length": self.message_bytes,
            "grpc.http2.lookahead_bytes": self.ahead_bytes,
            "grpc.max_allowed_incoming_connections": self.connections,
            "grpc.max_concurrent_streams": self.streams,
            "grpc.server_handshake_timeout_ms": _milliseconds(self.handshake_s),
            "grpc.max_connection_idle_ms": _milliseconds(self.idle_s),
            "grpc.max_metadata_size": METADATA_BYTES,
            "grpc.absolute_max_metadata_size": METADATA_BYTES,
            # No program of ours compresses. A compressed message could be a thousand times larger in memory.
            "grpc.compression_enabled_algorithms_bitset": 1,
        }
        if self.age_s is not None:
            own["grpc.max_connection_age_ms"] = _milliseconds(self.age_s)
            own["grpc.max_connection_age_grace_ms"] = _milliseconds(self.handshake_s)
        return tuple({**dict(server_options()), **own}.items())


def ports(config: ServerConfig, connections: Connections) -> dict[str, Port]:
    """The ports of a coordinator, by the names of their settings."""
    limits = config.connections
    streams, times = limits.calls_per_client, (limits.handshake_s, limits.idle_s)
    ahead_bytes = int(config.transfers.ahead_mib * (1 << 20))
    calls = CALLS_PER_CLIENT * config.limits.max_clients + EXTRA_CALLS
    return {
        "listen": Port(MAX_MESSAGE_BYTES, connections.clients, streams, calls, *times, ahead_bytes=ahead_bytes),
        "admin_listen": Port(largest_request(ADMIN), connections.admin, streams, 4 * connections.admin, *times),
        "token_listen": Port(largest_request(ADMIN), connections.admin, streams, 4 * connections.admin, *times),
        "enroll_listen": Port(
            largest_request("/fl.v1.Enrollment/"),
            connections.enrollment,
            PROBE_STREAMS,
            2 * connections.enrollment,
            *times,
            age_s=PROBE_AGE_S,
        ),
        "health_listen": Port(
            largest_request("/grpc.health.v1.Health/"),
            connections.health,
            PROBE_STREAMS,
            2 * connections.health,
            *times,
            age_s=PROBE_AGE_S,
        ),
    }


def web_options() -> ChannelOptions:
    """The grpc options of the web process's socket: one connection, which has the calls of all browsers."""
    own = {
        "grpc.max_receive_message_length": LARGEST_WEB_BYTES,
        "grpc.max_concurrent_streams": WEB_CALLS,
        "grpc.max_metadata_size": METADATA_BYTES,
        "grpc.absolute_max_metadata_size": METADATA_BYTES,
        "grpc.compression_enabled_algorithms_bitset": 1,
    }
    return tuple({**dict(server_options()), **own}.items())


def _milliseconds(seconds: float) -> int:
    return max(1, round(1000 * seconds))
