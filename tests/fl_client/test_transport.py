"""The connection to a coordinator: made with the options that both ends agree on."""

from __future__ import annotations

import grpc.aio
import pytest

from fl_client.errors import Unreachable
from fl_client.transport import GrpcTransport, _error_of
from protos.fl.v1 import errors_pb2
from protos.pem import Pem
from protos.status import status_metadata
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


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_a_retry_window_is_kept_whatever_the_code(code):
    """Too busy, or more than one client's share: the call is made again after the wait, and nothing is given up."""
    detail = errors_pb2.RetryLater(wait={"seconds": 7})
    trailing = grpc.aio.Metadata(*status_metadata(code.value[0], "later", detail))
    error = _error_of(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, "later"))
    assert (type(error), error.wait) == (Unreachable, 7.0)
