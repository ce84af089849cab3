"""The HTTP server for Prometheus: one thread, a bounded number of connections, and a time limit for each.

Silent connections would block a server that has one thread per connection. Here a connection costs one open file until
its request is complete. When there are too many, the server closes the one that has waited longest for its request,
because a scraper sends its request at once.
"""

from __future__ import annotations

import io
import selectors
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

MAX_REQUEST_BYTES = 16 << 10
"""Request line and headers; Prometheus sends some 400 bytes."""
_ACCEPTS = 64
"""Connections accepted in a row before the open ones are served."""
_READ_BYTES = 16 << 10
_TICK_S = 0.5

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of the server."""

    connections: int = 32
    """Open at the same time."""
    seconds: float = 10.0
    """Longest time from the start of a connection to the end of its response."""


DEFAULT_LIMITS = ServerLimits()


@dataclass(slots=True)
class _Connection:
    """An accepted connection."""

    socket: socket.socket
    ends: float
    """When it is closed, in monotonic time."""
    request: bytes = b""
    response: memoryview | None = None
    """The part not yet sent; None until the request is complete."""


class MetricsServer:
    """Serves one WSGI application over HTTP/1.0, one request per connection."""

    def __init__(self, app: WsgiApp, address: tuple[str, int], limits: ServerLimits) -> None:
        """Listen. Raises OSError."""
        self._app, self._limits = app, limits
        family, *_, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(where[:2], family=family, backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._connections: dict[int, _Connection] = {}
        """Open connections by file descriptor, the oldest first."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker, self._wakes = socket.socketpair()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._closing = False

    def serve(self) -> None:
        """Answer requests until `close`, in a thread of its own."""
        try:
            while not self._closing:
                for key, _ in self._selector.select(_TICK_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif (connection := self._connections.get(key.fd)) is not None:
                        self._progress(connection)
                self._close_overdue(time.monotonic())
        finally:
            for connection in list(self._connections.values()):
                self._close(connection)
            self._selector.close()
            for opened in (self._listener, self._waker, self._wakes):
                opened.close()

    def close(self) -> None:
        """End `serve`; from any thread."""
        self._closing = True
        with suppress(OSError):
            self._waker.send(b"x")

    def _accept(self) -> None:
        for _ in range(min(_ACCEPTS, self._limits.connections)):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no file descriptor is free: the connection waits in the kernel
                time.sleep(0.05)
                return
            accepted.setblocking(False)
            connection = _Connection(accepted, time.monotonic() + self._limits.seconds)
            self._connections[accepted.fileno()] = connection
            self._selector.register(accepted, selectors.EVENT_READ)
            self._progress(connection)  # a scraper's request has often arrived already
            if len(self._connections) > self._limits.connections:
                self._close(self._longest_waiting())

    def _longest_waiting(self) -> _Connection:
        waiting = (connection for connection in self._connections.values() if connection.response is None)
        return next(waiting, next(iter(self._connections.values())))

    def _progress(self, connection: _Connection) -> None:
        """Read or write as far as possible without waiting."""
        try:
            if connection.response is None:
                self._read(connection)
            if connection.response is not None:
                connection.response = connection.response[connection.socket.send(connection.response) :]
        except BlockingIOError:
            return
        except OSError:
            self._close(connection)
            return
        if connection.response is not None and not connection.response:
            self._close(connection)

    def _read(self, connection: _Connection) -> None:
        received = connection.socket.recv(_READ_BYTES)
        if not received:
            raise ConnectionResetError
        connection.request += received
        head, end, _ = connection.request.partition(b"\r\n\r\n")
        if end:
            connection.response = memoryview(respond(self._app, head))
        elif not connection.request[:1].isalpha():
            connection.response = memoryview(_plain("400 Bad Request"))  # such as a TLS handshake
        elif len(connection.request) > MAX_REQUEST_BYTES:
            connection.response = memoryview(_plain("431 Request Header Fields Too Large"))
        else:
            return
        self._selector.modify(connection.socket, selectors.EVENT_WRITE)

    def _close_overdue(self, now: float) -> None:
        for connection in [connection for connection in self._connections.values() if connection.ends <= now]:
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        number = connection.socket.fileno()
        if self._connections.pop(number, None) is not None:
            self._selector.unregister(connection.socket)
            connection.socket.close()


def respond(app: WsgiApp, head: bytes) -> bytes:
    """The complete response to a request's head."""
    try:
        line, *headers = head.decode("latin-1").split("\r\n")
        method, target, _ = line.split(" ")
    except ValueError:
        return _plain("400 Bad Request")
    if method not in {"GET", "OPTIONS"}:
        return _plain("405 Method Not Allowed")
    path, _, query = target.partition("?")
    environ: dict[str, Any] = {
        "REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query, "SERVER_PROTOCOL": "HTTP/1.0",
        "wsgi.input": io.BytesIO(), "wsgi.errors": sys.stderr, "wsgi.url_scheme": "http",
    }  # fmt: skip
    for header in headers:
        name, _, value = header.partition(":")
        environ[f"HTTP_{name.strip().upper().replace('-', '_')}"] = value.strip()
    started: list[Any] = []
    try:
        body = b"".join(app(environ, lambda status, headers, *_: started.extend((status, headers))))
    except Exception:  # noqa: BLE001 - an error in a collector must not end the server
        traceback.print_exc()
        return _plain("500 Internal Server Error")
    status, fields = started
    lines = [f"HTTP/1.0 {status}", *(f"{name}: {value}" for name, value in fields), f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1") + body


def _plain(status: str) -> bytes:
    return f"HTTP/1.0 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode("latin-1")
