"""A TCP relay that can be cut or silenced in both directions, as a network that fails."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

_PIECE = 1 << 16


def free_port() -> int:
    """A port that nobody gets as the local end of a connection: below those that Linux gives out."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


class Relay:
    """Forwards the bytes of all connections to host:port, or to the socket of a path. A context manager."""

    def __init__(self, target: str | Callable[[], str]) -> None:
        """target: a function is asked for each connection; "": nobody is there."""
        self._target = target
        self._sockets: list[socket.socket] = []
        self._passing = threading.Event()
        self._passing.set()
        self._refusing = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """host:port for callers."""
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Reset all connections, and every new one at once."""
        self._refusing = True
        self._close_all()

    def silence(self) -> None:
        """Let no byte pass in any direction; connections stay open."""
        self._passing.clear()

    def heal(self) -> None:
        """Let new connections pass. Those of before are reset."""
        self._refusing = False
        self._close_all()
        self._passing.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()
        self._passing.set()

    def _close_all(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                if self._refusing:
                    caller.close()
                    continue
                threading.Thread(target=self._connect, args=(caller,), daemon=True).start()

    def _connect(self, caller: socket.socket) -> None:
        try:
            server = self._open()
        except OSError:
            caller.close()
            return
        self._sockets += [caller, server]
        threading.Thread(target=self._forward, args=(caller, server), daemon=True).start()
        threading.Thread(target=self._forward, args=(server, caller), daemon=True).start()

    def _open(self) -> socket.socket:
        target = self._target if isinstance(self._target, str) else self._target()
        if target.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(target)
            return server
        host, _, port = target.rpartition(":")
        if not host:
            raise ConnectionRefusedError
        return socket.create_connection((host, int(port)))

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(_PIECE):
                self._passing.wait()
                sink.sendall(piece)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
