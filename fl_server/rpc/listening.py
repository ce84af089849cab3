"""The grpc servers of a coordinator: one for each port, with the checks that its callers get."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import grpc.aio
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from fl_common.certificates.pem import Pem
from fl_server.rpc.access.bearer import Tokens
from fl_server.rpc.health import Health, add_port
from fl_server.rpc.interceptors import CallInterceptor, CallPolicy
from fl_server.rpc.limits.lasting_server import LastingServer
from fl_server.rpc.limits.listeners import EXTRA_CALLS, Port
from fl_server.rpc.limits.open_calls import CallLimits
from fl_server.rpc.tls import Certificates
from fl_server.services import Services


@dataclass(frozen=True, slots=True)
class Callers:
    """Who calls a port whose callers have no certificates."""

    presented: Callable[[], Pem] | None = None
    """What the port shows in place of the coordinator's own files."""
    tokens: Tokens | None = None
    """Verifies what operators send; None: callers have no identity."""


class Listeners:
    """Opens the ports, and stops them together."""

    def __init__(self, services: Services, ports: dict[str, Port], certificates: Certificates | None) -> None:
        self._services, self._ports, self._certificates = services, ports, certificates
        self._servers: list[grpc.aio.Server] = []
        self.addresses: dict[str, str] = {}
        """host:port, by the setting's name."""

    def open(self, address: str, setting: str, callers: Callers | None = None) -> grpc.aio.Server:
        """A server that listens, not started yet. callers: None where they have the certificates of the settings.

        Raises SettingsError for an address that cannot be used.
        """
        port, metrics = self._ports[setting], self._services.metrics
        checks = CallInterceptor(self._policy(setting, callers))
        self._services.revocations.on_change.append(checks.end_denied)
        make = partial(
            grpc.aio.server,
            interceptors=[*self._services.traces.server_interceptors(), checks],
            options=port.options(),
            # More calls than the interceptor accepts: its message is better than grpc's.
            maximum_concurrent_rpcs=port.calls + EXTRA_CALLS,
        )
        credentials = None
        if self._certificates is not None:
            credentials = partial(
                self._certificates.credentials,
                metrics.handshakes.labels(setting).inc,
                None if callers is None else callers.presented,
                asks_callers=callers is None,
            )
        server = LastingServer(make, credentials)
        number = add_port(server, address, setting, None if credentials is None else credentials())
        self.addresses[setting] = f"{address.rpartition(':')[0]}:{number}"
        self._servers.append(server)
        return server

    def _policy(self, setting: str, callers: Callers | None) -> CallPolicy:
        services, port, tls = self._services, self._ports[setting], self._services.config.tls
        return CallPolicy(
            services.metrics,
            CallLimits(port.streams, port.calls, known_connections=2 * port.connections),
            setting,
            services.fleet.refuse_holder,
            services.revocations.denied,
            services.config.limits.stall_s,
            services.audit,
            trusts_everybody=callers is None and (tls is None or tls.no_client_certificates),
            tokens=None if callers is None else callers.tokens,
        )

    async def start(self, server: grpc.aio.Server, service: str, probes: Health) -> None:
        """Start a server with its health, and with reflection if the settings ask for it."""
        probes.serve_on(server)
        if self._services.config.reflection:
            reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await server.start()

    async def stop(self, grace_s: float) -> None:
        """Stop all servers at once."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
