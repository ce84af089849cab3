"""The connection to a coordinator: made with the options that both ends agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from fl_client.connection.transport import GrpcTransport
from fl_client.connection.transport_errors import error_of
from fl_client.errors import Unreachable
from fl_common.certificates.pem import Pem, PemFiles
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2
from protos.status import status_metadata
from protos.wire import client_options
from tests.processes.certificates import Pki
from tests.processes.closing_port import closing_port


@pytest.mark.parametrize(
    ("tls", "makes"), [(None, "insecure_channel"), (Pem(b"cert", b"key", b"ca"), "secure_channel")]
)
def test_a_connection_has_the_agreed_options(monkeypatch: pytest.MonkeyPatch, tls: Any, makes: Any) -> None:
    """It has keepalive, size limits and its own TCP connection, with and without TLS."""
    made = []
    monkeypatch.setattr(grpc.aio, makes, lambda *_, options, interceptors: made.append(tuple(options)))
    GrpcTransport("127.0.0.1:1", tls)
    assert made == [client_options()]


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_a_retry_window_is_kept_whatever_the_code(code: grpc.StatusCode) -> None:
    """After RESOURCE_EXHAUSTED or UNAVAILABLE the call is repeated after the wait, and nothing is given up."""
    detail = errors_pb2.RetryLater(wait={"seconds": 7})
    trailing = grpc.aio.Metadata(*status_metadata(code.value[0], "later", detail))
    error = error_of(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, "later"))
    assert (type(error), error.wait) == (Unreachable, 7.0)


async def test_a_connection_that_is_closed_in_the_handshake_is_explained(tmp_path: Path) -> None:
    """No certificate was checked, so the reason is not one of them."""
    pki = Pki(tmp_path)
    files = pki.issue("client", "edge-1")
    pem = Pem(files.cert.read_bytes(), files.key.read_bytes(), files.ca.read_bytes())
    with closing_port() as address:
        transport = GrpcTransport(address, pem)
        with pytest.raises(Unreachable, match="closed in the TLS handshake, before a certificate was checked"):
            await transport.register(pb.RegisterRequest(client_id="edge-1"))
        await transport.close()


ISSUED: dict[str, tuple[dict[str, Any], str]] = {
    "ended": ({"days": 7, "begins": -10}, "the coordinator's certificate, or that of its authority, has ended"),
    "early": ({"begins": 5}, "the coordinator's certificate, or that of its authority, is not valid yet"),
    "other host": ({"hosts": ("fl.example.org",)}, "the coordinator's certificate is for another host name"),
    "other authority": ({}, "the coordinator's certificate is not signed by tls.ca"),
}
"""Kind of a coordinator's certificate -> how it is issued, and the explanation of the failed connection."""


@pytest.mark.parametrize("kind", ISSUED)
async def test_the_fault_of_a_coordinators_certificate_is_named(tmp_path: Path, kind: str) -> None:
    """Ended, not valid yet, for another host, of another authority: each has its own words."""
    issued, text = ISSUED[kind]
    trusted = Pki(tmp_path / "pki")
    signer = Pki(tmp_path / "foreign") if kind == "other authority" else trusted
    theirs, own = signer.issue("server", "coordinator", **issued), trusted.issue("client", "edge-1")
    pair = (theirs.key.read_bytes(), theirs.cert.read_bytes())
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair], trusted.ca.read_bytes(), True))
    await server.start()
    transport = GrpcTransport(f"127.0.0.1:{port}", PemFiles(own.cert, own.key, own.ca).read())
    try:
        with pytest.raises(Unreachable, match=f"^{text}"):
            await transport.register(pb.RegisterRequest())
    finally:
        await transport.close()
        await server.stop(None)
