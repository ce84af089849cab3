"""A TCP relay that can keep a server's answers from its caller, as a network that fails in one direction."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PIECE = 1 << 16


class HoldingRelay:
    """Forwards the bytes of all connections to a server. After `hold`, the server's bytes are dropped."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._held = False
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """Drop what the server sends from now on."""
        self._held = True

    def close(self) -> None:
        """Close all connections."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [caller, server]
                threading.Thread(target=self._forward, args=(caller, server), daemon=True).start()
                threading.Thread(target=self._forward, args=(server, caller, True), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, answers: bool = False) -> None:
        with suppress(OSError):
            while piece := source.recv(_PIECE):
                if not (answers and self._held):
                    sink.sendall(piece)


@contextmanager
def holding_relay(target: str) -> Iterator[HoldingRelay]:
    """A relay to host:port."""
    relay = HoldingRelay(target)
    try:
        yield relay
    finally:
        relay.close()
