"""Opens the Unix socket for the web process, and starts that process."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc.aio

from fl_common.settings import SettingsError
from fl_server.config import ServerConfig
from fl_server.rpc.access.method_roles import METHOD_ROLES, WEB_METHODS
from fl_server.rpc.admin import AdminService
from fl_server.rpc.interceptors import CallInterceptor, CallPolicy
from fl_server.rpc.limits.listeners import WEB_CALLS, web_options
from fl_server.rpc.limits.open_calls import CallLimits
from fl_server.rpc.tls import Certificates
from fl_server.rpc.web.logins import WebLoginService
from fl_server.runs.coordinator import Coordinator
from fl_server.services import Services
from fl_server.web.certificate import PageCertificate
from fl_server.web.process import WebProcess
from fl_server.web.sessions import WebSessions
from fl_server.web.settings import Page, coordinator_socket, line_for, listening_socket, page_url, require_packages
from protos.fl.v1 import admin_pb2_grpc, web_pb2_grpc


class WebPage:
    """The web page of a coordinator: its socket, its process, and the sessions of its browsers."""

    def __init__(self, services: Services, coordinator: Coordinator, certificates: Certificates | None) -> None:
        self._services, self._coordinator, self._certificates = services, coordinator, certificates
        self._server: grpc.aio.Server | None = None
        self._running: asyncio.Task[None] | None = None
        self.process: WebProcess | None = None
        self._certificate = self._page_certificate(services.config)

    def _page_certificate(self, config: ServerConfig) -> PageCertificate | None:
        """Raises SettingsError."""
        certificates = self._certificates
        if certificates is None or config.tls is None or config.web_tls is None:
            return None
        return PageCertificate(config.web_tls, config.tls, lambda: certificates.pem)

    async def start(self, address: str, sessions: WebSessions) -> str:
        """Serve the page. Returns host:port. Raises SettingsError."""
        require_packages()
        listening = listening_socket(address)
        host, port = address.rpartition(":")[0], listening.getsockname()[1]
        config = self._services.config
        sessions.url = page_url(config, f"{host}:{port}")
        path = coordinator_socket(config.state_dir)
        self._server = self._admin(sessions)
        try:
            self._server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise SettingsError(f"web_listen: cannot make the socket {path}: {error}") from error
        path.chmod(0o600)
        await self._server.start()
        self._own, self._secrets_key = (path, listening.fileno()), sessions.key
        ends = self._services.metrics.web_process_ends.inc
        self.process = WebProcess(self._settings(), listening.fileno(), ends)
        self._running = asyncio.create_task(self.process.run())
        self._running.add_done_callback(lambda _: listening.close())
        return f"{host}:{port}"

    def _settings(self) -> bytes:
        """The line of settings of the web process, as it is now."""
        tls = None if self._certificate is None else self._certificate.values()
        return line_for(self._services.config, Page(*self._own, self._secrets_key, tls))

    def poll(self) -> None:
        """Read the page's certificate again. Blocking."""
        if self._certificate is not None:
            self._certificate.poll()

    def renew(self) -> None:
        """Give the web process what `poll` has found."""
        if self.process is not None:
            self.process.renew(self._settings())

    def _admin(self, sessions: WebSessions) -> grpc.aio.Server:
        services = self._services
        has_login = services.config.operators_have_names
        policy = CallPolicy(
            services.metrics,
            CallLimits(WEB_CALLS, WEB_CALLS),
            "web_listen",
            denied=services.revocations.denied,
            stall_s=services.config.limits.stall_s,
            audit=services.audit,
            trusts_everybody=not has_login,
            tokens=sessions if has_login else None,
            names_addresses=True,
            methods={name: METHOD_ROLES[name] for name in WEB_METHODS},
        )
        checks = CallInterceptor(policy)
        services.revocations.on_change += [sessions.drop_denied, checks.end_denied]
        server = grpc.aio.server(interceptors=[checks], options=web_options())
        admin_pb2_grpc.add_AdminServicer_to_server(AdminService(services, self._coordinator), server)
        web_pb2_grpc.add_WebLoginServicer_to_server(
            WebLoginService(sessions, self._authorities, services.audit), server
        )
        return server

    def _authorities(self) -> bytes | None:
        return None if self._certificates is None else self._certificates.pem.ca

    async def stop(self) -> None:
        """End the process, and close the socket."""
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running
        if self._server is not None:
            await self._server.stop(0.2)
