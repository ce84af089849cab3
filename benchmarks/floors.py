"""Lower bounds of a round's time: the same bytes through bare gRPC streams, and through raw TCP.

`benchmarks.round_overhead` uses this module. One server process and one process for each client run on loopback. In
every turn each client receives `bytes_down` and then sends `bytes_up`; nothing is checked, stored or summed. gRPC has
the product's options, chunk size and asyncio server; TCP has a thread for each connection.
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

from benchmarks.crowds.processes import running
from protos.wire import CHUNK_BYTES, client_options, server_options

_SPAWN = multiprocessing.get_context("spawn")
DOWN, UP = "/floor/Down", "/floor/Up"


@dataclass(frozen=True)
class Traffic:
    """The bytes of one turn, and the number of turns."""

    clients: int
    bytes_down: int
    """Bytes to each client."""
    bytes_up: int
    """Bytes from each client."""
    rounds: int


def grpc_seconds(traffic: Traffic) -> float:
    """Median seconds of a turn over bare gRPC streams."""
    return _median_turn(_serve_grpc, _client_grpc, traffic)


def tcp_seconds(traffic: Traffic) -> float:
    """Median seconds of a turn over raw TCP."""
    return _median_turn(_serve_tcp, _client_tcp, traffic)


@contextmanager
def grpc_floor(traffic: Traffic) -> Iterator[tuple[int, Callable[[], tuple[float, float]]]]:
    """A server of bare streams for clients of the caller. Yields its port, and what waits for the result.

    That is the median seconds of a turn, and the server's processor time for one. The first turn, in which the clients
    connect, is not counted.
    """
    here, there = _SPAWN.Pipe()

    def result() -> tuple[float, float]:
        seconds: list[float] = here.recv()
        used: list[float] = here.recv()
        return statistics.median(seconds[1:]), (used[-1] - used[0]) / (len(used) - 1)

    with running(_serve_grpc, [(there, traffic)]):
        yield here.recv(), result


def _median_turn(serve: Callable[..., None], client: Callable[..., None], traffic: Traffic) -> float:
    here, there = _SPAWN.Pipe()
    with running(serve, [(there, traffic)]):
        port = here.recv()
        with running(client, [(port, traffic)] * traffic.clients):
            seconds: list[float] = here.recv()
            return statistics.median(seconds)


class _Turns:
    """Synchronises the clients of a turn and measures its time."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._arrived = self._done = 0
        self._began = 0.0
        self.seconds: list[float] = []
        self.used: list[float] = []
        """Processor time of the server's process at the end of each turn."""

    def arrive(self) -> bool:
        """A client is ready to receive. True if it is the last one: the turn begins."""
        self._arrived += 1
        if self._arrived % self._traffic.clients:
            return False
        self._began = time.monotonic()
        return True

    def finish(self) -> bool:
        """A client's bytes have arrived. True if these are the last ones of the last turn."""
        self._done += 1
        if self._done % self._traffic.clients == 0:
            self.seconds.append(time.monotonic() - self._began)
            self.used.append(time.process_time())
        return len(self.seconds) == self._traffic.rounds


def _serve_grpc(results: Connection, traffic: Traffic) -> None:
    asyncio.run(_grpc_server(results, traffic))


async def _grpc_server(results: Connection, traffic: Traffic) -> None:
    turns, over, chunks = _Turns(traffic), asyncio.Event(), chunks_of(traffic.bytes_down)
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
    results.send(turns.used)


def _client_grpc(port: int, traffic: Traffic) -> None:
    asyncio.run(_grpc_client(port, traffic))


async def _grpc_client(port: int, traffic: Traffic) -> None:
    chunks = chunks_of(traffic.bytes_up)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=list(client_options())) as channel:
        down: Any = channel.unary_stream(DOWN)
        up: Any = channel.stream_unary(UP)
        for _ in range(traffic.rounds):
            async for _ in down(b""):
                pass
            await up(iter(chunks))


def chunks_of(size: int) -> list[bytes]:
    """The bytes of one direction, in chunks."""
    whole = bytes(CHUNK_BYTES)
    return [whole] * (size // CHUNK_BYTES) + [bytes(size % CHUNK_BYTES)]


def _serve_tcp(results: Connection, traffic: Traffic) -> None:
    turns, lock, over = _Turns(traffic), threading.Lock(), threading.Event()
    barrier = threading.Barrier(traffic.clients)
    down = bytes(traffic.bytes_down)

    def serve(connection: socket.socket) -> None:
        with connection:
            for _ in range(traffic.rounds):
                with lock:
                    turns.arrive()
                barrier.wait()
                connection.sendall(down)
                _receive(connection, traffic.bytes_up)
                with lock:
                    last = turns.finish()
            if last:
                over.set()

    with socket.create_server(("127.0.0.1", 0), backlog=traffic.clients) as listener:
        results.send(listener.getsockname()[1])
        for _ in range(traffic.clients):
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
        over.wait()
    results.send(turns.seconds)


def _client_tcp(port: int, traffic: Traffic) -> None:
    up = bytes(traffic.bytes_up)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(traffic.rounds):
            _receive(connection, traffic.bytes_down)
            connection.sendall(up)


def _receive(connection: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while size:
        count = connection.recv_into(buffer, min(size, len(buffer)))
        if not count:
            raise ConnectionError("the peer has closed the connection")
        size -= count
