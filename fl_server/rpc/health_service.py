"""The service grpc.health.v1.Health for a fixed set of names. It keeps nothing of unknown names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeAlias

from grpc_health.v1 import health_pb2

from fl_server.errors import NoSuchService

Status: TypeAlias = int
"""A HealthCheckResponse.ServingStatus."""
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


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
        found = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._states.items()}
        return health_pb2.HealthListResponse(statuses=found)

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
