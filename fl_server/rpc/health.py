"""Health checks: whether the process is alive, and whether it is ready for calls.

They use grpc.health.v1.Health, on the ports of clients and operators, and on a port of their own, because a kubelet's
probes use plain text only.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fl_common.settings import SettingsError
from fl_server.metrics import Metrics
from fl_server.rpc.health_service import Probes
from fl_server.rpc.interceptors import CallInterceptor, CallPolicy
from fl_server.rpc.limits.lasting_server import LastingServer
from fl_server.rpc.limits.listeners import Port
from fl_server.rpc.limits.open_calls import CallLimits

LIVE = "live"
"""Name of the liveness check: SERVING while the event loop runs, also during recovery and while draining."""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """The health of one process. It is ready from `ready` until `leave`, and never again after that."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = ("", *services)
        self._probes = Probes((LIVE, *self._services))
        self._left = False
        self._server: grpc.aio.Server | None = None
        self._policy: CallPolicy | None = None
        self.addresses: dict[str, str] = {}
        """Address of its own port, by the setting's name; empty without one."""

    async def listen(self, address: str | None, port: Port) -> None:
        """Start to answer, not ready yet. Raises SettingsError if the port cannot be used."""
        self._probes.set(LIVE, _SERVING)
        if address is None:
            return
        self._policy = CallPolicy(None, CallLimits(port.streams, port.calls), "health_listen", stall_s=port.handshake_s)
        checks, options = CallInterceptor(self._policy), port.options()
        self._server = LastingServer(lambda: grpc.aio.server(interceptors=[checks], options=options))
        self.serve_on(self._server)
        number = add_port(self._server, address, "health_listen")
        await self._server.start()
        self.addresses["health_listen"] = f"{address.rpartition(':')[0]}:{number}"

    def serve_on(self, server: grpc.aio.Server) -> None:
        """Also answer on this server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._probes, server)

    def count(self, metrics: Metrics) -> None:
        """Count calls from now on."""
        if self._policy is not None:
            self._policy.metrics = metrics

    async def ready(self) -> None:
        """Report ready, unless the process is already leaving."""
        if not self._left:
            self._set(_SERVING)

    async def leave(self) -> None:
        """Report not ready, for good."""
        self._left = True
        self._set(_NOT_SERVING)

    async def close(self) -> None:
        """Stop the server of its own port."""
        if self._server is not None:
            await self._server.stop(0)

    def _set(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in self._services:
            self._probes.set(service, status)


def add_port(
    server: grpc.aio.Server, address: str, setting: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    """Let a server listen. Returns the port. Raises SettingsError, which names the setting, if that fails."""
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise SettingsError(
            f"{setting}: cannot listen on {address}: the port is in use, or the address is not this machine's; "
            f"choose another, or port 0 for any free one"
        ) from error
