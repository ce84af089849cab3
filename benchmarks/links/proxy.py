"""A TCP proxy on loopback in a process of its own, which gives every connection a link of its own.

Bytes leave in order at the link's rate and arrive half a round trip later. Half-closes and resets arrive in the same
way. Both ends have their TCP connection to the proxy, so losses, TCP's slow start and its windows are not part of the
link: what remains is the limit of the protocol above TCP.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from benchmarks.crowds.processes import running
from benchmarks.links.link import Link, TokenBucket

_HOST = "127.0.0.1"
_PIECE = 1 << 16
_KERNEL_BYTES = 1 << 18
"""The kernel's buffer of each connection, so that a full queue is felt by the sender."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: the connection is closed with a reset."""
START_S = 30.0


@contextmanager
def proxy(address: str, link: Link) -> Iterator[str]:
    """Serve a proxy to host:port while the block runs. Yields the proxy's host:port."""
    here, there = multiprocessing.Pipe()
    with running(_main, [(address, link, there)]):
        there.close()
        if not here.poll(START_S):
            raise SystemExit(f"expected the proxy's port within {START_S:g} s")
        yield f"{_HOST}:{here.recv()}"


def _main(address: str, link: Link, ready: Connection) -> None:
    host, _, port = address.rpartition(":")

    async def serve() -> None:
        with listen() as listener:
            ready.send(listener.getsockname()[1])
            await forward(listener, (host, int(port)), link)

    asyncio.run(serve())


def listen() -> socket.socket:
    """A listening socket on a free port of loopback."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BYTES)
    listener.bind((_HOST, 0))
    listener.listen(1024)
    listener.setblocking(False)
    return listener


async def forward(listener: socket.socket, target: tuple[str, int], link: Link) -> None:
    """Forward every connection to `target`, without end."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as connections:
        while True:
            accepted, _ = await loop.sock_accept(listener)
            connections.create_task(_connection(accepted, target, link))


async def _connection(client: socket.socket, address: tuple[str, int], link: Link) -> None:
    """Forward one connection until both directions have ended, or one end has reset it."""
    target = socket.socket()
    with client, target:
        target.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BYTES)
        for end in (client, target):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().sock_connect(target, address)
            async with asyncio.TaskGroup() as directions:
                directions.create_task(_Direction(client, target, link.up, link).run())
                directions.create_task(_Direction(target, client, link.down, link).run())
        except* OSError:
            for end in (client, target):
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


class _Direction:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, target: socket.socket, rate: float, link: Link) -> None:
        self._source, self._target = source, target
        self._bucket, self._delay_s = TokenBucket(rate), link.round_trip_s / 2
        self._free = link.buffer_bytes + int(rate * self._delay_s)
        """Bytes that the link still has room for: waiting in its queue, and on their way."""
        self._room = asyncio.Event()
        self._coming: asyncio.Queue[tuple[float, bytes | OSError]] = asyncio.Queue()
        """Arrival time, and what arrives: bytes, the end (no bytes), or a reset."""

    async def run(self) -> None:
        """Forward until the end. Raises OSError for a reset by either end."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._accept())
            both.create_task(self._deliver())

    async def _accept(self) -> None:
        loop, data = asyncio.get_running_loop(), b"?"
        while data:
            while self._free <= 0:
                self._room.clear()
                await self._room.wait()
            try:
                data = await loop.sock_recv(self._source, _PIECE)
            except OSError as error:
                self._coming.put_nowait((loop.time() + self._delay_s, error))
                return
            self._free -= len(data)
            self._coming.put_nowait((self._bucket.departure(len(data), loop.time()) + self._delay_s, data))

    async def _deliver(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            at, arrived = await self._coming.get()
            await asyncio.sleep(at - loop.time())
            if isinstance(arrived, OSError):
                raise arrived
            if not arrived:
                self._target.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(self._target, arrived)
            self._free += len(arrived)
            self._room.set()
