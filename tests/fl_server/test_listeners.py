"""What each port is made with, and how open files are shared out among them."""

from __future__ import annotations

import asyncio
import socket

import grpc.aio
import pytest

from fl_server.config import ConnectionsConfig, ServerConfig
from fl_server.open_files import Connections, share
from fl_server.rpc.listeners import METADATA_BYTES, Port, ports
from protos.wire import MAX_MESSAGE_BYTES

WANTED = ConnectionsConfig()
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
def test_open_files_are_shared_out(limit, clients, expected):
    """Clients get what the rest leaves, up to an eighth more than there may be of them."""
    assert share(limit, clients, WANTED) == expected


def test_each_port_takes_what_it_needs(tmp_path):
    """Chunks at the clients' port alone; probes get little of everything, and not for long."""
    made = ports(ServerConfig(state_dir=tmp_path, insecure=True), Connections(100, 20, 10, 5))
    options = {setting: dict(port.options()) for setting, port in made.items()}
    sizes = {setting: each["grpc.max_receive_message_length"] for setting, each in options.items()}
    assert sizes == {"listen": MAX_MESSAGE_BYTES, "admin_listen": 1 << 20, "health_listen": 1 << 10}
    assert [each["grpc.max_allowed_incoming_connections"] for each in options.values()] == [100, 20, 10]
    assert "grpc.max_connection_age_ms" in options["health_listen"]
    assert "grpc.max_connection_age_ms" not in options["listen"]


@pytest.fixture
async def address():
    """Of a server with PORT's options that answers every call."""

    async def one(request, context):
        return request

    server = grpc.aio.server(options=PORT.options())
    handlers = {"One": grpc.unary_unary_rpc_method_handler(one)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    number = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield "127.0.0.1", number
    await server.stop(None)


def closed(connection):
    """Once the other side has closed it."""
    connection.settimeout(20)
    try:
        while connection.recv(1000):
            pass
    except ConnectionResetError:
        pass
    return True


async def test_connections_over_the_limit_are_closed_and_silent_ones_too(address):
    """The first without waiting, the others when their time is over; then there is room again."""
    held = [socket.create_connection(address) for _ in range(PORT.connections + 1)]
    try:
        assert all(await asyncio.gather(*(asyncio.to_thread(closed, each) for each in held)))
    finally:
        for each in held:
            each.close()
    async with grpc.aio.insecure_channel(f"{address[0]}:{address[1]}") as channel:
        assert await channel.unary_unary("/t.T/One")(b"x", wait_for_ready=True, timeout=20) == b"x"


@pytest.mark.parametrize(
    ("request_", "metadata"),
    [(b"x" * 2000, ()), (b"x", (("key", "v" * METADATA_BYTES),))],
    ids=["message", "metadata"],
)
async def test_what_is_larger_is_refused_by_the_transport(address, request_, metadata):
    """The options that we set are options that grpc has."""
    async with grpc.aio.insecure_channel(f"{address[0]}:{address[1]}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t.T/One")(request_, metadata=metadata, timeout=20)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
