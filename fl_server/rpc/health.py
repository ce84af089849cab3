"""Health checks: whether the process is alive, and whether it is ready for calls.

They use grpc.health.v1.Health, on the ports of clients and operators, and on a port of their own, because a kubelet's
probes use plain text only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeAlias

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fl_server.errors import NoSuchService
from fl_server.metrics import Metrics
from fl_server.rpc.call_limits import CallLimits
from fl_server.rpc.interceptors import CallInterceptor, CallPolicy
from fl_server.rpc.ports import LastingServer, Port

Status: TypeAlias = int
"""A HealthCheckResponse.ServingStatus."""
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LIVE = "live"
"""Name of the liveness check: SERVING while the event loop runs, also during recovery and while draining."""


class Probes:
    """The states of named services, for Check, List and Watch. Lives on the event loop."""

    def __init__(self, names: Sequence[str]) -> None:
        """All names start as NOT_SERVING."""
        self._states: dict[str, Status] = dict.fromkeys(names, _NOT_SERVING)
        self._changed = asyncio.Event()

    def set(self, name: str, status: Status) -> None:
        """Set a service's state."""
        self._states[name] = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:  # noqa: N802, ARG002 - gRPC fixes name and arguments
        """A service's state. Raises NoSuchService."""
        if (status := self._states.get(request.service)) is None:
            raise NoSuchService(request.service, sorted(self._states))
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: health_pb2.HealthListRequest, context: Any) -> health_pb2.HealthListResponse:  # noqa: N802, ARG002 - gRPC fixes name and arguments
        """The states of all services."""
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._states.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802 - gRPC fixes the name
        self,
        request: health_pb2.HealthCheckRequest,
        context: Any,  # noqa: ARG002 - gRPC fixes the arguments
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """A service's state, now and after each change; SERVICE_UNKNOWN for an unknown one, and the stream ends."""
        sent: Status | None = None
        while True:
            changed, status = self._changed, self._states.get(request.service, _UNKNOWN)
            if status != sent:
                sent = status
                yield health_pb2.HealthCheckResponse(status=status)
            if status == _UNKNOWN:
                return
            await changed.wait()


class Health:
    """The health of one process. It is ready from `ready` until `leave`, and never again after that."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = ("", *services)
        self._probes = Probes((LIVE, *self._services))
        self._left = False
        self._server: LastingServer | None = None
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
        self.addresses["health_listen"] = self._server.listen(address, "health_listen")
        await self._server.start()

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

    def pause(self) -> None:
        """Report not ready, until `resume`."""
        self._set(_NOT_SERVING)

    def resume(self) -> None:
        """Report ready again, unless the process is already leaving."""
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
