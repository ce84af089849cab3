"""The web page of a coordinator: the Unix socket for the process that serves it, and that process.

On the socket the Admin service answers the methods that read, for the sessions of browsers. Nothing else may call it:
only the owner of the state directory can open the socket.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc.aio

from fl_common.certificates.pem import PemWatcher
from fl_common.settings import SettingsError
from fl_server.audit.log import AuditLog
from fl_server.config import ServerConfig
from fl_server.metrics import Metrics
from fl_server.web.logins import WebLoginService
from fl_server.web.process import WebProcess
from fl_server.web.sessions import WebSessions
from fl_server.web.settings import (
    Page,
    PageCertificate,
    coordinator_socket,
    line_for,
    listening_socket,
    page_url,
    require_packages,
)
from protos.fl.v1 import web_pb2_grpc


class WebPage:
    """The web page of a coordinator: its socket, its process, and the sessions of its browsers."""

    def __init__(self, config: ServerConfig, sessions: WebSessions, certificates: PemWatcher | None) -> None:
        """certificates: the files of `[tls]`. Raises SettingsError for files of the page that cannot be used."""
        self._config, self._sessions, self._certificates = config, sessions, certificates
        self._server: grpc.aio.Server | None = None
        self._running: asyncio.Task[None] | None = None
        self.process: WebProcess | None = None
        self._own: PageCertificate | None = None
        if certificates is not None and config.tls is not None and config.web_tls is not None:
            self._own = PageCertificate(config.web_tls, config.tls, certificates)

    async def start(self, server: grpc.aio.Server, address: str, audit: AuditLog, metrics: Metrics) -> str:
        """Serve the page at an address. Returns host:port. Raises SettingsError.

        server: has the Admin service, and gets the logins and the socket.
        """
        require_packages()
        listening = listening_socket(address)
        host, port = address.rpartition(":")[0], listening.getsockname()[1]
        self._sessions.url = page_url(self._config, f"{host}:{port}")
        path = coordinator_socket(self._config.state_dir)
        logins = WebLoginService(self._sessions, self._certificates, audit)
        web_pb2_grpc.add_WebLoginServicer_to_server(logins, server)
        try:
            server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise SettingsError(f"web_listen: cannot make the socket {path}: {error}") from error
        path.chmod(0o600)
        self._server = server
        await server.start()
        self._sockets = path, listening.fileno()
        self.process = WebProcess(self._settings(), listening.fileno(), metrics.web_process_ends.inc)
        self._running = asyncio.create_task(self.process.run())
        self._running.add_done_callback(lambda _: listening.close())
        return f"{host}:{port}"

    def _settings(self) -> bytes:
        """The line of settings of the web process, as it is now."""
        tls = None if self._own is None else self._own.values()
        return line_for(self._config, Page(*self._sockets, self._sessions.key, tls))

    def poll(self) -> None:
        """Read the page's certificate again. Blocking."""
        if self._own is not None:
            self._own.poll()

    def renew(self) -> None:
        """Give the web process what `poll` has found."""
        if self.process is not None:
            self.process.renew(self._settings())

    async def stop(self) -> None:
        """End the process, and close the socket."""
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running
        if self._server is not None:
            await self._server.stop(0.2)
