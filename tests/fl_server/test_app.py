"""The coordinator put together: what its ports are made with."""

from __future__ import annotations

import grpc.aio

from fl_server.app import Server
from fl_server.config import ServerConfig
from fl_server.health import Health
from fl_server.open_files import Connections
from fl_server.rpc.requests import LARGEST_ADMIN_BYTES
from protos.wire import MAX_MESSAGE_BYTES, server_options

CONNECTIONS = Connections(clients=300, admin=20, health=10, metrics=5)
SIZE, CONNECTIONS_OPTION = "grpc.max_receive_message_length", "grpc.max_allowed_incoming_connections"


async def test_both_ports_watch_over_their_connections(tmp_path, monkeypatch):
    """Keepalive and sizes, on the port for clients and on the one for operators."""
    made, make = [], grpc.aio.server
    monkeypatch.setattr(grpc.aio, "server", lambda **how: made.append(tuple(how["options"])) or make(**how))
    config = ServerConfig(
        state_dir=tmp_path, insecure=True, listen="127.0.0.1:0", admin_listen="127.0.0.1:0", metrics_listen=None
    )
    server = Server(config, Health(()), CONNECTIONS)
    await server.start()
    await server.stop()
    for options in made:
        own = dict(options)
        assert own.items() >= {**dict(server_options()), SIZE: own[SIZE]}.items()
    assert [dict(options)[CONNECTIONS_OPTION] for options in made] == [300, 20]
    assert [dict(options)[SIZE] for options in made] == [MAX_MESSAGE_BYTES, LARGEST_ADMIN_BYTES]


async def test_a_scrape_sees_that_a_coordinator_drains(tmp_path):
    """0 while it serves, 1 from the moment that it hands out nothing new; the disk is looked at, too."""
    config = ServerConfig(
        state_dir=tmp_path, insecure=True, listen="127.0.0.1:0", admin_listen="127.0.0.1:0", metrics_listen=None
    )
    server = Server(config, Health(()), CONNECTIONS)
    look = server._parts.metrics.registry.get_sample_value
    await server.start()
    assert (look("fl_draining"), look("fl_state_dir_available_bytes") > 0) == (0, True)
    await server.drain()
    assert look("fl_draining") == 1
    await server.stop()
