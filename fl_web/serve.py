"""Serves the web application over HTTP: connections, their limits, and TLS."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fl_common.rate_limits import network_of
from fl_web.access.requests import Application, host_port
from fl_web.access.sessions import PEER_CERTIFICATE

MOST_CONNECTIONS, MOST_OF_ADDRESS = 1000, 600
"""Open connections in all, and of one address or /64 network of IPv6. Further ones are closed at once."""
HANDSHAKE_S = 10.0
"""A connection without TLS after this time is closed."""


class Listener(socket.socket):
    """A socket that listens, for an asyncio server."""

    def __init__(self, listening: socket.socket) -> None:
        """listening: it is taken over, and must not be used any more."""
        super().__init__(fileno=listening.detach())
        self._open: Counter[str] = Counter()
        self._handshakes: dict[int, asyncio.TimerHandle] = {}
        """The timers of connections that are not established yet, by the number of their file."""

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. Raises ConnectionAbortedError for one that is over a limit, which is closed."""
        accepted, address = super().accept()
        whose = network_of(host_port(address))
        if self._open.total() >= MOST_CONNECTIONS or self._open[whose] >= MOST_OF_ADDRESS:
            accepted.close()
            raise ConnectionAbortedError
        self._open[whose] += 1
        connection = _Accepted(self, whose, accepted)
        timer = asyncio.get_running_loop().call_later(HANDSHAKE_S, connection.cut)
        self._handshakes[connection.fileno()] = timer
        return connection, address

    def established(self, connection: int) -> None:
        """A connection is established, with TLS if the page has it. connection: the number of its file."""
        if (timer := self._handshakes.pop(connection, None)) is not None:
            timer.cancel()

    def released(self, whose: str) -> None:
        """A connection of this caller was closed."""
        self._open[whose] -= 1
        if not self._open[whose]:
            del self._open[whose]


class _Accepted(socket.socket):
    """A connection that counts until it is closed."""

    def __init__(self, listener: Listener, whose: str, accepted: socket.socket) -> None:
        super().__init__(fileno=accepted.detach())
        self._listener: Listener | None = listener
        self._whose = whose

    def cut(self) -> None:
        """End the connection; whoever serves it reads its end."""
        with suppress(OSError):  # it has ended already
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        if (listener := self._listener) is not None:
            self._listener = None
            listener.established(self.fileno())
            listener.released(self._whose)
        super().close()


_STOP_S = 1
"""Open event streams are ended this long after a signal."""
HEAD_S = 10.0
"""A connection that has not sent a request's headers in this time is closed."""
HEAD_BYTES = 16 << 10
"""Largest headers of a request."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificate and key of a page with TLS, as PEM. The process has them from the coordinator, and opens no file."""

    cert: str
    key: str
    client_ca: str | None
    """Authorities of client certificates, which a browser may show. None: it is not asked for one."""
    min_version: str = "1.3"

    def context(self) -> ssl.SSLContext:
        """The TLS context for new connections. Raises ssl.SSLError."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2 if self.min_version == "1.2" else ssl.TLSVersion.TLSv1_3
        self.load(made)
        if self.client_ca is not None:
            made.verify_mode = ssl.CERT_OPTIONAL
        return made

    def load(self, context: ssl.SSLContext) -> None:
        """Use these in a context from its next connection on. Raises ssl.SSLError."""
        with open(os.memfd_create("page"), "w") as file:  # noqa: PTH123 - the library reads certificates from a file only
            file.write(f"{self.cert}\n{self.key}")
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        if self.client_ca is not None:
            context.load_verify_locations(cadata=self.client_ca)


class Connection(H11Protocol):
    """A connection of a browser: its client certificate, and a limit of time for the headers of each request."""

    _waits: asyncio.TimerHandle | None = None

    def __init__(self, listener: Listener, **given: Any) -> None:
        """listener: where the connection was accepted. given: what uvicorn gives its protocols."""
        super().__init__(**given)
        self._listener = listener

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        """The connection was accepted, and TLS is established."""
        super().connection_made(transport)
        self._listener.established(transport.get_extra_info("socket").fileno())
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


def server(app: Application, listener: Listener, tls: Tls | None = None) -> uvicorn.Server:
    """A server: `await server.serve(sockets=[listener])`. Raises OSError, ssl.SSLError."""
    config = uvicorn.Config(
        app,
        http=partial(Connection, listener),  # type: ignore[arg-type]  # it is called, as a class would be
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
    listener = Listener(listening)
    await server(app, listener).serve(sockets=[listener])


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
