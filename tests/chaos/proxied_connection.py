"""One connection through a proxy."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from typing import Literal

from tests.chaos.grpc_bytes import Piece, Reader
from tests.chaos.proxy_log import ProxyLog
from tests.chaos.traps import Direction, Stop, Traps

End = Literal["reset", "end"]
_READ_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing sends RST."""


class Connection:
    """A client's connection and its connection to the target, in the proxy's event loop."""

    def __init__(self, client: socket.socket, traps: Traps, log: ProxyLog, large: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._client, self._target = client, socket.socket()
        self._traps, self._log, self._large = traps, log, large
        self._ending: asyncio.Future[End] = self._loop.create_future()
        self.passing = asyncio.Event()
        """Held bytes wait for this event."""
        for each in (client, self._target):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def end(self, how: End) -> None:
        """Close both sides soon, in the way of the first call."""
        if not self._ending.done():
            self._ending.set_result(how)

    async def run(self, address: tuple[str, int]) -> None:
        """Forward in both directions until one side, a trap or the proxy ends the connection."""
        pumps: list[asyncio.Task[None]] = []
        try:
            await self._loop.sock_connect(self._target, address)
            pumps = [
                self._loop.create_task(self._pump(self._client, self._target, "up")),
                self._loop.create_task(self._pump(self._target, self._client, "down")),
            ]
        except OSError:
            self.end("reset")
        how = await self._ending
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        self._log.closed(id(self))
        for each in (self._client, self._target):
            await _close(each, how)

    async def _pump(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        reader = Reader(self._large, from_client=direction == "up")
        try:
            while data := await self._loop.sock_recv(source, _READ_BYTES):
                for piece in reader.feed(data):
                    await self._pass(piece, sink, direction)
            self.end("end")
        except OSError:
            self.end("reset")

    async def _pass(self, piece: Piece, sink: socket.socket, direction: Direction) -> None:
        """Send a piece on, unless a trap stops it."""
        passes, rest, stop = self._traps.met(direction, piece)
        await self._loop.sock_sendall(sink, passes.data)
        self._log.passed(id(self), direction, passes)
        if stop is not None:
            await self._stop(stop)
            await self._pass(rest, sink, direction)

    async def _stop(self, stop: Stop) -> None:
        """Wait until the proxy passes on again; never returns if the connection is cut."""
        if stop.action == "hold":
            self.passing.clear()
            await self.passing.wait()
        else:
            self.end(stop.action)
            await self._loop.create_future()


async def _close(each: socket.socket, how: End) -> None:
    """Close a socket. Before a reset, wait until the receiver has acknowledged the forwarded bytes."""
    if how == "reset":
        for _ in range(100):
            if not _unsent(each):
                break
            await asyncio.sleep(0.005)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    each.close()


def _unsent(each: socket.socket) -> int:
    """Number of bytes that the peer's machine has not acknowledged."""
    return int(struct.unpack("i", fcntl.ioctl(each, termios.TIOCOUTQ, b"\0" * 4))[0])
