"""What probes are told: whether the process lives, and whether it is ready for calls.

Everything is told by grpc.health.v1.Health: on the ports of clients and operators, and, because a kubelet's probes
speak plain text only, on a port of its own that serves nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fl_server.interceptors import CallInterceptor, CallPolicy
from fl_server.metrics import Metrics
from fl_server.rpc.callers import Callers
from fl_server.rpc.listeners import Port
from fl_server.rpc.probes import Probes
from protos.settings import SettingsError

LIVE = "live"
"""A service by name only: it is SERVING while the event loop answers, also during recovery and while draining."""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """The state of one process. Ready between `ready` and `leave`; a process that is leaving is not ready again."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = ("", *services)
        self._probes = Probes((LIVE, *self._services))
        self._left = False
        self._server: grpc.aio.Server | None = None
        self._policy: CallPolicy | None = None
        self.addresses: dict[str, str] = {}
        """Where the port of its own is, by the setting's name; empty without one."""

    async def listen(self, address: str | None, port: Port) -> None:
        """Answer from now on, not ready yet. Raises SettingsError for a port that cannot be had."""
        self._probes.set(LIVE, _SERVING)
        if address is None:
            return
        self._policy = CallPolicy(None, Callers(port.streams, port.calls), "health_listen", stall_s=port.handshake_s)
        self._server = grpc.aio.server(interceptors=[CallInterceptor(self._policy)], options=port.options())
        self.serve_on(self._server)
        number = add_port(self._server, address, "health_listen")
        await self._server.start()
        self.addresses["health_listen"] = f"{address.rpartition(':')[0]}:{number}"

    def serve_on(self, server: grpc.aio.Server) -> None:
        """Answer on this server too."""
        health_pb2_grpc.add_HealthServicer_to_server(self._probes, server)

    def count(self, metrics: Metrics) -> None:
        """Calls are counted from now on."""
        if self._policy is not None:
            self._policy.metrics = metrics

    async def ready(self) -> None:
        """Calls are welcome, unless the process is leaving already."""
        if not self._left:
            self._set(_SERVING)

    async def leave(self) -> None:
        """No new calls, for good."""
        self._left = True
        self._set(_NOT_SERVING)

    async def close(self) -> None:
        """The last answer was given."""
        if self._server is not None:
            await self._server.stop(0)

    def _set(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in self._services:
            self._probes.set(service, status)


def add_port(
    server: grpc.aio.Server, address: str, setting: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    """Let a server listen; returns the port. Raises SettingsError, by the setting's name, if it cannot be had."""
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise SettingsError(
            f"{setting}: cannot listen on {address}: the port is in use, or the address is not this machine's; "
            f"choose another, or port 0 for any free one"
        ) from error
