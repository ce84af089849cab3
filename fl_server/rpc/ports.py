"""The listening ports: the transport's limits of each (connections, streams, sizes, times), and the server of one.

The effects were measured with the grpc version in constraints.txt. A connection over the limit is closed when it is
accepted. One that does not finish TLS and the first HTTP/2 frames in time is closed, in plain text too. Headers and
messages over their limits end the call with RESOURCE_EXHAUSTED before our code runs.

A connection is an open file, and so are the ledger, a checkpoint that is written, and the two files of an update that
is received. Connections get a share; the rest is reserved for files that must not fail.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
import grpc.aio
import structlog

from fl_common.settings import SettingsError
from fl_server.rpc.methods import ADMIN, WORKER_CALLS, WORKERS, largest_request
from fl_server.settings.config import ServerConfig
from fl_server.settings.sections import ConnectionsConfig, LimitsConfig
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
_OF_ALL_PORTS = {
    "grpc.max_metadata_size": METADATA_BYTES,
    "grpc.absolute_max_metadata_size": METADATA_BYTES,
    # No program of ours compresses. A compressed message could be a thousand times larger in memory.
    "grpc.compression_enabled_algorithms_bitset": 1,
}
PROBE_STREAMS = 8
PROBE_AGE_S = 60.0
"""A connection to a port for callers without a name is closed after this time: no peer can occupy the few there are."""
AGE_GRACE_S = 600.0
"""Time for the transfers in progress on a connection that is to end. One that takes longer is resumed."""
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
    """Raise the process's soft limit to its hard limit, and divide it.

    also: settings of the ports that are on beside the usual ones: "enroll_listen", "token_listen".
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return share(_most_files(hard), clients, wanted, also)


def warn_of_few_files(limits: LimitsConfig, connections: Connections) -> None:
    """Log that fewer clients can connect than `max_clients`: a warning where the settings name this number."""
    if connections.clients < limits.max_clients:
        limit = _most_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        todo = "raise LimitNOFILE (systemd) or `ulimit -Hn`, or lower limits.max_clients"
        write = log.warning if "max_clients" in limits.model_fields_set else log.info
        write("few_open_files", limit=limit, connections=connections.clients, max_clients=limits.max_clients, todo=todo)


def _most_files(hard: int) -> int:
    return MOST if hard == resource.RLIM_INFINITY else hard


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
    age_grace_s: float | None = None
    """Time for the calls in progress then. None: `handshake_s`."""
    shared: bool = False
    """Whether several processes listen on the port, and the kernel gives each some of the connections."""

    def options(self) -> ChannelOptions:
        """The grpc options of the port's server."""
        own = {
            "grpc.max_receive_message_length": self.message_bytes,
            "grpc.http2.lookahead_bytes": self.ahead_bytes,
            "grpc.max_allowed_incoming_connections": self.connections,
            "grpc.max_concurrent_streams": self.streams,
            "grpc.server_handshake_timeout_ms": _milliseconds(self.handshake_s),
            "grpc.max_connection_idle_ms": _milliseconds(self.idle_s),
            **_OF_ALL_PORTS,
        }
        if self.age_s is not None:
            own["grpc.max_connection_age_ms"] = _milliseconds(self.age_s)
            own["grpc.max_connection_age_grace_ms"] = _milliseconds(self.age_grace_s or self.handshake_s)
        if self.shared:
            own["grpc.so_reuseport"] = 1
        return tuple({**dict(server_options()), **own}.items())


def ports(config: ServerConfig, connections: Connections) -> dict[str, Port]:
    """The ports of a coordinator, by the names of their settings."""
    limits = config.connections
    streams, times = limits.calls_per_client, (limits.handshake_s, limits.idle_s)
    operators = Port(largest_request(ADMIN), connections.admin, streams, 4 * connections.admin, *times)

    def for_strangers(service: str, most: int) -> Port:
        return Port(largest_request(service), most, PROBE_STREAMS, 2 * most, *times, age_s=PROBE_AGE_S)

    return {
        "listen": _for_clients(config, connections),
        # One connection of each worker, for the transfers of all its clients.
        "workers.listen": Port(
            largest_request(WORKERS), connections.admin, WORKER_CALLS, WORKER_CALLS, limits.handshake_s, 86_400.0
        ),
        **dict.fromkeys(("admin_listen", "token_listen"), operators),
        "enroll_listen": for_strangers("/fl.v1.Enrollment/", connections.enrollment),
        "health_listen": for_strangers("/grpc.health.v1.Health/", connections.health),
    }


def _for_clients(config: ServerConfig, connections: Connections) -> Port:
    limits = config.connections
    ahead_bytes = int(config.transfers.ahead_mib * (1 << 20))
    calls = CALLS_PER_CLIENT * config.limits.max_clients + EXTRA_CALLS
    times = limits.handshake_s, limits.idle_s
    return Port(MAX_MESSAGE_BYTES, connections.clients, limits.calls_per_client, calls, *times, ahead_bytes)


def worker_port(config: ServerConfig, connections: Connections, age_s: float) -> Port:
    """The port of a worker for clients."""
    return replace(_for_clients(config, connections), age_s=age_s, age_grace_s=AGE_GRACE_S, shared=True)


def web_options() -> ChannelOptions:
    """The grpc options of the web process's socket: one connection, which has the calls of all browsers."""
    own = {
        "grpc.max_receive_message_length": LARGEST_WEB_BYTES,
        "grpc.max_concurrent_streams": WEB_CALLS,
        **_OF_ALL_PORTS,
    }
    return tuple({**dict(server_options()), **own}.items())


def _milliseconds(seconds: float) -> int:
    return max(1, round(1000 * seconds))


CHECK_S = 0.1
"""Period of the checks."""
ENDING_S = 3600.0
"""Longest time for the calls in progress of a server whose loop has ended."""


def server_of(
    port: Port, checks: Sequence[grpc.aio.ServerInterceptor], credentials: Callable[[], grpc.ServerCredentials] | None
) -> LastingServer:
    """A server with the limits of a port."""
    # More calls than the interceptor accepts: its message is better than grpc's.
    most = port.calls + EXTRA_CALLS
    make = partial(grpc.aio.server, interceptors=checks, options=port.options(), maximum_concurrent_rpcs=most)
    return LastingServer(make, credentials)


class LastingServer(grpc.aio.Server):
    """Has the interface of a grpc.aio server with one port, and goes on serving it when the accept loop ends.

    grpc.aio reads the path of every call in the loop that accepts calls, as UTF-8. One call with another path ends that
    loop: no call is accepted any more, and nothing reports that (seen with grpcio 1.85). So the loop is observed. When
    it has ended, a new server takes the port within a fraction of a second, and calls in progress go on to their end in
    the old one. Callers of new calls connect again, as after any cut. Lives on the event loop.
    """

    def __init__(
        self, make: Callable[[], grpc.aio.Server], credentials: Callable[[], grpc.ServerCredentials] | None = None
    ) -> None:
        """make: makes a server without handlers and ports.

        credentials: makes those of one server, for credentials that read certificates anew serve one only; None: none.
        """
        self._make, self._credentials = make, credentials
        self._server = make()
        self._handlers: list[tuple[grpc.GenericRpcHandler, ...]] = []
        self._address = ""
        self._ending: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Do what grpc.aio.Server does."""
        handlers = tuple(generic_rpc_handlers)
        self._handlers.append(handlers)
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """Nothing: generated code adds the same handlers as generic ones too, which the interceptor wraps."""

    def listen(self, address: str, setting: str) -> str:
        """Listen at an address, not started yet. Returns host:port.

        Raises SettingsError, which names the setting, for an address that cannot be used.
        """
        try:
            if self._credentials is None:
                self.add_insecure_port(address)
            else:
                self.add_secure_port(address, self._credentials())
        except RuntimeError as error:
            raise SettingsError(
                f"{setting}: cannot listen on {address}: the port is in use, or the address is not this machine's; "
                f"choose another, or port 0 for any free one"
            ) from error
        return self._address

    def add_insecure_port(self, address: str) -> int:
        """Do what grpc.aio.Server does."""
        return self._listens(address, self._server.add_insecure_port(address))

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """Do what grpc.aio.Server does."""
        return self._listens(address, self._server.add_secure_port(address, server_credentials))

    def _listens(self, address: str, number: int) -> int:
        self._address = f"{address.rpartition(':')[0]}:{number}"
        return number

    async def start(self) -> None:
        """Serve until `stop`."""
        await self._server.start()
        self._watching = asyncio.create_task(self._watch())

    async def stop(self, grace: float | None) -> None:
        """Do what grpc.aio.Server does."""
        if self._watching is not None:
            self._watching.cancel()
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._server.stop(grace)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - grpc fixes the name
        """Do what grpc.aio.Server does, for the present server."""
        return bool(await self._server.wait_for_termination(timeout))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if not _accepts(self._server):
                await self._replace()

    async def _replace(self) -> None:
        server = self._make()
        for handlers in self._handlers:
            server.add_generic_rpc_handlers(handlers)
        try:
            if self._credentials is None:
                server.add_insecure_port(self._address)
            else:
                server.add_secure_port(self._address, self._credentials())
        except RuntimeError:  # the old server still holds it: at the next check
            return
        await server.start()
        self._server, old = server, self._server
        ending = asyncio.create_task(_end(old))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        log.error("port_served_again", listen=self._address, reason="a call with an invalid path ended the accept loop")


def _accepts(server: grpc.aio.Server) -> bool:
    """Whether its accept loop runs. grpc.aio has no public name for this."""
    inner: Any = server
    return bool(inner._server.is_running())  # noqa: SLF001 - see above


async def _end(server: grpc.aio.Server) -> None:
    """Free a server when its calls have ended."""
    with suppress(Exception):  # the error that ended its loop
        await server.stop(ENDING_S)
