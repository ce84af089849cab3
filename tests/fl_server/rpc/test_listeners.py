"""The options of each port, and the distribution of open files among the ports."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from fl_server.rpc.ports import METADATA_BYTES, Connections, Port, ports, share, worker_port
from fl_server.settings.config import ServerConfig
from fl_server.settings.sections import ConnectionsConfig, TransfersConfig
from protos.wire import MAX_MESSAGE_BYTES
from tests.fl_server.harness import TIMEOUT_S

WANTED = ConnectionsConfig()
SETTINGS, INITIAL_WINDOW_SIZE = 4, 4
"""A type of frame, and one of its parameters, in HTTP/2."""
PORT = Port(1024, connections=3, streams=4, calls=8, handshake_s=0.2, idle_s=60.0)


@pytest.mark.parametrize(
    ("limit", "clients", "expected"),
    [
        (1 << 20, 20_000, Connections(22_564, 128, 64, 32)),
        (20_000, 20_000, Connections(15_616, 128, 64, 32)),
        (1024, 100, Connections(176, 64, 64, 32)),
        (256, 20_000, Connections(88, 16, 16, 8)),
        (64, 20_000, Connections(4, 4, 4, 4)),
    ],
)
def test_open_files_are_distributed_among_the_ports(limit: int, clients: int, expected: Connections) -> None:
    """The clients' port gets the rest, up to an eighth more than max_clients."""
    assert share(limit, clients, WANTED) == expected


@pytest.mark.parametrize(("limit", "expected"), [(1 << 20, 1024), (4096, 256), (64, 4)])
def test_a_port_for_enrollment_takes_its_part_of_the_open_files(limit: int, expected: int) -> None:
    """Only if there is one; the clients' port has as many fewer."""
    without, shared = share(limit, 1 << 20, WANTED), share(limit, 1 << 20, WANTED, ["enroll_listen"])
    assert (without.enrollment, shared.enrollment) == (0, expected)
    assert shared.clients == max(4, without.clients - expected)


def test_a_port_for_tokens_takes_as_many_as_that_for_certificates() -> None:
    """Operators have two ports then; the clients' port has as many fewer."""
    without, shared = share(4096, 1 << 20, WANTED), share(4096, 1 << 20, WANTED, ["token_listen"])
    assert shared.clients == without.clients - without.admin


def test_each_port_has_its_own_limits(tmp_path: Path) -> None:
    """Only the clients' port accepts chunks, the workers' long headers; probes have small limits and short times."""
    made = ports(ServerConfig(state_dir=tmp_path, insecure=True), Connections(100, 20, 10, 5, 7))
    options = {setting: dict(port.options()) for setting, port in made.items()}
    sizes = {setting: each["grpc.max_receive_message_length"] for setting, each in options.items()}
    assert sizes == {
        "listen": MAX_MESSAGE_BYTES, "admin_listen": 1 << 20, "token_listen": 1 << 20, "enroll_listen": 16 << 10,
        "health_listen": 1 << 10, "workers.listen": 2 * MAX_MESSAGE_BYTES,
    }  # fmt: skip
    assert [each["grpc.max_allowed_incoming_connections"] for each in options.values()] == [100, 20, 20, 20, 7, 10]
    assert "grpc.max_connection_age_ms" in options["health_listen"]
    assert "grpc.max_connection_age_ms" not in options["listen"]


def test_the_port_of_workers_for_clients_is_shared_and_its_connections_end(tmp_path: Path) -> None:
    """All other ports have one owner, and connections of clients that last."""
    config, connections = ServerConfig(state_dir=tmp_path, insecure=True), Connections(100, 20, 10, 5, 7)
    options = dict(worker_port(config, connections, 600.0).options())
    assert (options["grpc.so_reuseport"], options["grpc.max_connection_age_ms"]) == (1, 600_000)
    assert options["grpc.max_connection_age_grace_ms"] == 600_000
    assert {dict(port.options())["grpc.so_reuseport"] for port in ports(config, connections).values()} == {0}


def test_only_the_clients_port_has_the_setting_for_bytes_ahead(tmp_path: Path) -> None:
    """The other ports keep 1 MiB, which is more than their largest request."""
    config = ServerConfig(state_dir=tmp_path, insecure=True, transfers=TransfersConfig(ahead_mib=12))
    made = ports(config, Connections(100, 20, 10, 5, 7))
    ahead = {setting: dict(port.options())["grpc.http2.lookahead_bytes"] >> 20 for setting, port in made.items()}
    assert ahead.pop("listen") == 12
    assert set(ahead.values()) == {1}


@pytest.mark.parametrize("mib", [0.25, 1, 12])
async def test_the_transport_grants_a_call_the_bytes_ahead(mib: float, tmp_path: Path) -> None:
    """The server's first frame has them as the initial window of every stream (RFC 9113, 6.5.2)."""
    config = ServerConfig(state_dir=tmp_path, insecure=True, transfers=TransfersConfig(ahead_mib=mib))
    port = replace(PORT, ahead_bytes=ports(config, Connections(100, 20, 10, 5, 7))["listen"].ahead_bytes)
    server = grpc.aio.server(options=port.options())
    number = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", number)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, SETTINGS, 0, 0, 0, 0, 0)))
    header = await reader.readexactly(9)
    assert header[3] == SETTINGS
    content = await reader.readexactly(int.from_bytes(header[:3]))
    assert dict(struct.iter_unpack(">HI", content))[INITIAL_WINDOW_SIZE] == mib * (1 << 20)
    writer.close()
    await server.stop(None)


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    """The address of a server with PORT's options that answers every call."""

    async def one(request: bytes, context: Any) -> bytes:
        return request

    server = grpc.aio.server(options=PORT.options())
    handlers: dict[str, Any] = {"One": grpc.unary_unary_rpc_method_handler(one)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    number = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield "127.0.0.1", number
    await server.stop(None)


def closed(connection: socket.socket) -> bool:
    """Wait until the other side has closed the connection."""
    connection.settimeout(TIMEOUT_S)
    try:
        while connection.recv(1000):
            pass
    except ConnectionResetError:
        pass
    return True


async def test_connections_over_the_limit_and_silent_ones_are_closed(address: tuple[str, int]) -> None:
    """The former at once, the latter after a time; then new ones are accepted again."""
    held = [socket.create_connection(address) for _ in range(PORT.connections + 1)]
    try:
        assert all(await asyncio.gather(*(asyncio.to_thread(closed, each) for each in held)))
    finally:
        for each in held:
            each.close()
    async with grpc.aio.insecure_channel(f"{address[0]}:{address[1]}") as channel:
        call: Any = channel.unary_unary("/t.T/One")
        assert await call(b"x", wait_for_ready=True, timeout=TIMEOUT_S) == b"x"


@pytest.mark.parametrize(
    ("request_", "metadata"),
    [(b"x" * 2000, ()), (b"x", (("key", "v" * METADATA_BYTES),))],
    ids=["message", "metadata"],
)
async def test_the_transport_refuses_larger_messages(
    address: tuple[str, int], request_: bytes, metadata: tuple[tuple[str, str], ...]
) -> None:
    """grpc knows the options that are set."""
    async with grpc.aio.insecure_channel(f"{address[0]}:{address[1]}") as channel:
        call: Any = channel.unary_unary("/t.T/One")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(request_, metadata=metadata, timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
