"""Serves the web application over HTTP: connections, their limits, and TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fl_web.access.asgi import Application
from fl_web.access.sessions import PEER_CERTIFICATE

_STOP_S = 1
"""Open event streams are ended this long after a signal."""
HEAD_S = 10.0
"""A connection that has not sent a request's headers in this time is closed."""
HEAD_BYTES = 16 << 10
"""Largest headers of a request."""
MOST_CONNECTIONS = 1000
"""Further connections are closed at once."""
CERTIFICATES_S = 30.0
"""Period of reading the certificate's files again. Open connections keep the earlier ones."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a page with TLS."""

    cert: Path
    key: Path
    client_ca: Path | None
    """Authorities of client certificates, which a browser may show. None: it is not asked for one."""
    min_version: str = "1.3"

    def context(self) -> ssl.SSLContext:
        """For new connections."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2 if self.min_version == "1.2" else ssl.TLSVersion.TLSv1_3
        made.load_cert_chain(self.cert, self.key)
        if self.client_ca is not None:
            made.verify_mode = ssl.CERT_OPTIONAL
            made.load_verify_locations(self.client_ca)
        return made


class Connection(H11Protocol):
    """A connection of a browser: its client certificate, and a limit of time for the headers of each request."""

    _waits: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        """The connection was accepted, and TLS is established."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        secured = transport.get_extra_info("ssl_object")
        certificate = None if secured is None else secured.getpeercert(binary_form=True)
        self.app_state = {**self.app_state, PEER_CERTIFICATE: certificate}
        self._wait(transport)

    def data_received(self, data: bytes) -> None:
        """A part of a request."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._wait(None)
        elif self._waits is None and not self.transport.is_closing():
            self._wait(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._wait(None)
        super().connection_lost(exc)

    def _wait(self, transport: asyncio.Transport | None) -> None:
        """Set the time limit, or end it with None."""
        if self._waits is not None:
            self._waits.cancel()
        self._waits = None if transport is None else self.loop.call_later(HEAD_S, transport.abort)


def server(app: Application, tls: Tls | None = None) -> uvicorn.Server:
    """A server for a socket that listens: `await server.serve(sockets=[...])`. Raises OSError, ssl.SSLError."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        date_header=True,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=_STOP_S,
        h11_max_incomplete_event_size=HEAD_BYTES,
        proxy_headers=False,
    )
    config.load()
    config.ssl = None if tls is None else tls.context()
    return uvicorn.Server(config)


async def serve(app: Application, listening: socket.socket) -> None:
    """Answer requests on a socket that listens, without TLS, until a signal to end."""
    await server(app).serve(sockets=[listening])


async def renew(context: ssl.SSLContext, tls: Tls, log: Callable[[str], Any]) -> None:
    """Read the certificate again when its files change, without end. Files that do not fit together are not used."""
    seen = await asyncio.to_thread(_stamps, tls)
    while True:
        await asyncio.sleep(CERTIFICATES_S)
        if (now := await asyncio.to_thread(_stamps, tls)) == seen:
            continue
        seen = now
        try:
            await asyncio.to_thread(tls.context)  # a whole check before the one in use is changed
            context.load_cert_chain(tls.cert, tls.key)
            if tls.client_ca is not None:
                context.load_verify_locations(tls.client_ca)
        except (OSError, ssl.SSLError) as error:
            log(f"the renewed certificate cannot be used: {error}")


def _stamps(tls: Tls) -> list[int]:
    files = [tls.cert, tls.key, *([] if tls.client_ca is None else [tls.client_ca])]
    return [path.stat().st_mtime_ns if path.exists() else 0 for path in files]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except OSError:
        listening.close()
        raise
    return listening
