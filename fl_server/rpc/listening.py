"""The grpc servers of a coordinator: one for each port, with its TLS credentials and the checks of its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import cast

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from fl_common.certificates.pem import Pem, PemChange, PemFiles, PemWatcher
from fl_common.certificates.tls_version import check_oldest_tls
from fl_server.metrics import Metrics
from fl_server.rpc.health import Health
from fl_server.rpc.interceptors import CallInterceptor, CallPolicy, Tokens
from fl_server.rpc.methods import METHODS, WEB_METHODS
from fl_server.rpc.open_calls import CallLimits
from fl_server.rpc.ports import EXTRA_CALLS, WEB_CALLS, LastingServer, Port, web_options
from fl_server.services import Services
from fl_server.settings.sections import TlsConfig
from fl_server.web.page import WebSessions

log = structlog.get_logger()

CHECK_S = 2.0
"""Period of the checks of the files. New content is used after the second check that finds it."""


class Certificates:
    """The coordinator's certificate and the CA of its callers. A renewal does not affect open connections."""

    def __init__(self, tls: TlsConfig, metrics: Metrics) -> None:
        """Read the files. Raises SettingsError if they cannot be used."""
        check_oldest_tls(tls.min_version)
        self.files = PemWatcher(PemFiles(tls.cert, tls.key, tls.client_ca, "client_ca"))
        self._metrics = metrics
        self._warned: Pem | None = None
        self._report_expiry()

    def credentials(
        self,
        began: Callable[[], None] = lambda: None,
        presented: Callable[[], Pem] | None = None,
        *,
        asks_callers: bool = True,
    ) -> grpc.ServerCredentials:
        """Credentials of one port. Client certificates are required if a CA for them is set.

        began: called at each handshake, in a thread of its own. presented: what the port uses in place of the files;
        it returns the same object as long as nothing has changed. asks_callers: False for a port whose callers have no
        certificates.
        """
        current = presented or (lambda: self.files.pem)
        used = [current()]

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """grpc calls this before each handshake, in a thread of its own; None: no change."""
            began()
            if (pem := current()) is used[0]:
                return None
            used[0] = pem
            return _configuration(pem)

        needed = asks_callers and used[0].ca is not None
        # grpc documents None; its type stubs do not have it.
        asked = cast("Callable[[], grpc.ServerCertificateConfiguration]", renewed)
        return grpc.dynamic_ssl_server_credentials(_configuration(used[0]), asked, needed)

    async def checks(self) -> AsyncIterator[None]:
        """Check the files periodically, without end. Yields after each check."""
        while True:
            await asyncio.sleep(CHECK_S)
            match await asyncio.to_thread(self.files.poll):
                case PemChange.RENEWED:
                    log.info("certificates_renewed", serial=f"{self.files.pem.leaf.serial_number:x}")
                case PemChange.UNUSABLE:
                    log.warning("certificates_not_used", reason=self.files.problem, todo="the earlier ones stay in use")
            self._report_expiry()
            yield

    def _report_expiry(self) -> None:
        pem = self.files.pem
        if pem is self._warned:
            return
        self._metrics.certificates.show(pem.periods())
        if pem.ending(datetime.now(UTC)):
            self._warned = pem
            log.warning("certificate_ends_soon", not_after=pem.leaf.not_valid_after_utc.isoformat())


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root_certificates=pem.ca)


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
        self.addresses = services.addresses
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
        self.addresses[setting] = server.listen(address, setting)
        self._servers.append(server)
        return server

    def _policy(self, setting: str, callers: Callers | None) -> CallPolicy:
        services, port, tls = self._services, self._ports[setting], self._services.config.tls
        return CallPolicy(
            services.metrics,
            CallLimits(port.streams, port.calls, known_connections=2 * port.connections),
            setting,
            services.fleet.records,
            services.revocations,
            services.config.limits.stall_s,
            services.audit,
            trusts_everybody=callers is None and (tls is None or tls.no_client_certificates),
            tokens=None if callers is None else callers.tokens,
        )

    def for_web(self, sessions: WebSessions) -> grpc.aio.Server:
        """A server for the web process's socket, which does not listen yet. It knows browsers by their sessions."""
        services = self._services
        has_login = services.config.operators_have_names
        policy = CallPolicy(
            services.metrics,
            CallLimits(WEB_CALLS, WEB_CALLS),
            "web_listen",
            revocations=services.revocations,
            stall_s=services.config.limits.stall_s,
            audit=services.audit,
            trusts_everybody=not has_login,
            tokens=sessions if has_login else None,
            names_addresses=True,
            methods={name: METHODS[name] for name in WEB_METHODS},
        )
        checks = CallInterceptor(policy)
        services.revocations.on_change += [sessions.drop_denied, checks.end_denied]
        return grpc.aio.server(interceptors=[checks], options=web_options())

    async def start(self, server: grpc.aio.Server, service: str, probes: Health) -> None:
        """Start a server with its health, and with reflection if the settings ask for it."""
        probes.serve_on(server)
        if self._services.config.reflection:
            reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await server.start()

    async def stop(self, grace_s: float) -> None:
        """Stop all servers at once."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
