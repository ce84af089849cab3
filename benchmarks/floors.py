"""What a round cannot be faster than: the same bytes through bare gRPC streams, and through raw TCP.

One server process and as many client processes as the round has, on loopback. In every turn each client takes
`bytes_down` and then sends `bytes_up`; nothing is looked at, kept or summed. gRPC has the product's own options, its
chunk size and its asyncio server; TCP has a thread for each connection.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio

from protos.wire import CHUNK_BYTES, client_options, server_options

_SPAWN = multiprocessing.get_context("spawn")
_DOWN, _UP = "/floor/Down", "/floor/Up"


@dataclass(frozen=True)
class Traffic:
    """What goes over the wire in one turn, and how often."""

    clients: int
    bytes_down: int
    """To each client."""
    bytes_up: int
    """From each client."""
    rounds: int


def grpc_seconds(traffic: Traffic) -> float:
    """Median seconds of a turn over bare gRPC streams."""
    return _median_turn(_serve_grpc, _client_grpc, traffic)


def tcp_seconds(traffic: Traffic) -> float:
    """Median seconds of a turn over raw TCP."""
    return _median_turn(_serve_tcp, _client_tcp, traffic)


def _median_turn(serve: Callable[..., None], client: Callable[..., None], traffic: Traffic) -> float:
    here, there = _SPAWN.Pipe()
    with _running(serve, (there, traffic)):
        port = here.recv()
        with _running(client, (port, traffic), traffic.clients):
            return statistics.median(here.recv())


@contextmanager
def _running(work: Callable[..., None], arguments: tuple[object, ...], count: int = 1) -> Iterator[None]:
    """Processes that do the work; none is left behind."""
    processes = [_SPAWN.Process(target=work, args=arguments, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


class _Turns:
    """Tells when everybody is there for a turn, and how long each took."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._came = self._done = 0
        self._began = 0.0
        self.seconds: list[float] = []

    def arrive(self) -> bool:
        """A client wants its bytes. True: it was the last one, and the turn begins."""
        self._came += 1
        if self._came % self._traffic.clients:
            return False
        self._began = time.monotonic()
        return True

    def finish(self) -> bool:
        """A client's bytes are here. True: they were the last ones of the last turn."""
        self._done += 1
        if self._done % self._traffic.clients == 0:
            self.seconds.append(time.monotonic() - self._began)
        return len(self.seconds) == self._traffic.rounds


def _serve_grpc(results: Connection, traffic: Traffic) -> None:
    asyncio.run(_grpc_server(results, traffic))


async def _grpc_server(results: Connection, traffic: Traffic) -> None:
    turns, over, chunks = _Turns(traffic), asyncio.Event(), _chunks(traffic.bytes_down)
    go = asyncio.Event()

    async def down(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        nonlocal go
        mine = go
        if turns.arrive():
            go.set()
            go = asyncio.Event()
        await mine.wait()
        for chunk in chunks:
            yield chunk

    async def up(requests: AsyncIterator[bytes], _context: object) -> bytes:
        async for _ in requests:
            pass
        if turns.finish():
            over.set()
        return b"ok"

    server = grpc.aio.server(options=list(server_options()))
    handlers: dict[str, Any] = {
        "Down": grpc.unary_stream_rpc_method_handler(down),
        "Up": grpc.stream_unary_rpc_method_handler(up),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("floor", handlers),))
    results.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await over.wait()
    await server.stop(1.0)
    results.send(turns.seconds)


def _client_grpc(port: int, traffic: Traffic) -> None:
    asyncio.run(_grpc_client(port, traffic))


async def _grpc_client(port: int, traffic: Traffic) -> None:
    chunks = _chunks(traffic.bytes_up)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=list(client_options())) as channel:
        down: Any = channel.unary_stream(_DOWN)
        up: Any = channel.stream_unary(_UP)
        for _ in range(traffic.rounds):
            async for _ in down(b""):
                pass
            await up(iter(chunks))


def _chunks(size: int) -> list[bytes]:
    whole = bytes(CHUNK_BYTES)
    return [whole] * (size // CHUNK_BYTES) + [bytes(size % CHUNK_BYTES)]


def _serve_tcp(results: Connection, traffic: Traffic) -> None:
    turns, lock, over = _Turns(traffic), threading.Lock(), threading.Event()
    barrier = threading.Barrier(traffic.clients)
    down = bytes(traffic.bytes_down)

    def talk(connection: socket.socket) -> None:
        with connection:
            for _ in range(traffic.rounds):
                with lock:
                    turns.arrive()
                barrier.wait()
                connection.sendall(down)
                _take(connection, traffic.bytes_up)
                with lock:
                    last = turns.finish()
            if last:
                over.set()

    with socket.create_server(("127.0.0.1", 0), backlog=traffic.clients) as listener:
        results.send(listener.getsockname()[1])
        for _ in range(traffic.clients):
            threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()
        over.wait()
    results.send(turns.seconds)


def _client_tcp(port: int, traffic: Traffic) -> None:
    up = bytes(traffic.bytes_up)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(traffic.rounds):
            _take(connection, traffic.bytes_down)
            connection.sendall(up)


def _take(connection: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while size:
        count = connection.recv_into(buffer, min(size, len(buffer)))
        if not count:
            raise ConnectionError("the other end is gone")
        size -= count
