"""The connection to a coordinator: made with the options that both ends agree on."""

from __future__ import annotations

import grpc.aio
import pytest

from fl_client.transport import GrpcTransport
from protos.pem import Pem
from protos.wire import client_options


@pytest.mark.parametrize(
    ("tls", "makes"), [(None, "insecure_channel"), (Pem(b"cert", b"key", b"ca"), "secure_channel")]
)
def test_a_connection_is_watched_over(monkeypatch, tls, makes):
    """Keepalive, sizes and a TCP connection of its own, with TLS and without."""
    made = []
    monkeypatch.setattr(grpc.aio, makes, lambda *_, options, interceptors: made.append(tuple(options)))
    GrpcTransport("127.0.0.1:1", tls)
    assert made == [client_options()]
