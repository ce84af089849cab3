"""The assembled coordinator: the options of its ports, and its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from structlog.testing import capture_logs

from fl_server.app import warn_of_open_ports
from fl_server.rpc.health import Health
from fl_server.rpc.methods import ADMIN, largest_request
from fl_server.rpc.ports import Connections
from fl_server.server import Server
from fl_server.settings.config import ServerConfig
from fl_server.settings.sections import TlsConfig
from protos.wire import MAX_MESSAGE_BYTES, server_options

CONNECTIONS = Connections(clients=300, admin=20, health=10, metrics=5)
SIZE, CONNECTIONS_OPTION = "grpc.max_receive_message_length", "grpc.max_allowed_incoming_connections"


async def test_both_ports_check_their_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepalive and message sizes, on the port for clients and on the port for operators."""
    options_of_servers: list[Any] = []
    make = grpc.aio.server

    def recorded(**arguments: Any) -> grpc.aio.Server:
        options_of_servers.append(tuple(arguments["options"]))
        return make(**arguments)

    monkeypatch.setattr(grpc.aio, "server", recorded)
    config = ServerConfig(
        state_dir=tmp_path, insecure=True, listen="127.0.0.1:0", admin_listen="127.0.0.1:0", metrics_listen=None
    )
    server = Server(config, Health(()), CONNECTIONS)
    await server.start()
    await server.stop()
    for options in options_of_servers:
        own = dict(options)
        assert own.items() >= {**dict(server_options()), SIZE: own[SIZE]}.items()
    assert [dict(options)[CONNECTIONS_OPTION] for options in options_of_servers] == [300, 20]
    assert [dict(options)[SIZE] for options in options_of_servers] == [MAX_MESSAGE_BYTES, largest_request(ADMIN)]


async def test_a_scrape_shows_a_drain(tmp_path: Path) -> None:
    """0 while it serves, 1 once it sends no new work; the free disk space is exported, too."""
    config = ServerConfig(
        state_dir=tmp_path, insecure=True, listen="127.0.0.1:0", admin_listen="127.0.0.1:0", metrics_listen=None
    )
    server = Server(config, Health(()), CONNECTIONS)

    def read(name: str) -> float:
        return server._services.metrics.registry.get_sample_value(name) or 0.0

    await server.start()
    assert (read("fl_draining"), read("fl_state_dir_available_bytes") > 0) == (0, True)
    await server.drain()
    assert read("fl_draining") == 1
    await server.stop()


def test_open_ports_are_logged_at_a_start() -> None:
    """TLS without client certificates was asked for by name, and may have been forgotten."""
    tls = TlsConfig(cert=Path("c"), key=Path("k"), no_client_certificates=True)
    with capture_logs() as logs:
        warn_of_open_ports(ServerConfig(state_dir=Path("s"), tls=tls))
        warn_of_open_ports(ServerConfig(state_dir=Path("s"), insecure=True))
    assert [(line["event"], line["log_level"]) for line in logs] == [("no_client_certificates", "warning")]
    assert "set tls.client_ca" in logs[0]["todo"]
