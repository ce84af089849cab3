"""The listening socket of the page: a limited number of open connections, in all and of one address.

They are counted when they are accepted, before a TLS handshake: a caller that never ends its handshake counts too.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import suppress
from typing import Any

from fl_common.addresses import network_of

MOST_CONNECTIONS, MOST_OF_ADDRESS = 1000, 600
"""Open connections in all, and of one address or /64 network of IPv6. Further ones are closed at once."""
HANDSHAKE_S = 10.0
"""A connection without TLS after this time is closed."""


def host_port(address: Any) -> str:
    """A socket's address as text; of IPv6 with brackets."""
    host, port = str(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Listener(socket.socket):
    """A socket that listens, for an asyncio server."""

    def __init__(self, listening: socket.socket) -> None:
        """listening: it is taken over, and must not be used any more."""
        super().__init__(fileno=listening.detach())
        self._open: Counter[str] = Counter()
        self._handshakes: dict[int, asyncio.TimerHandle] = {}
        """Of connections that are not established yet, by the number of their file."""

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
