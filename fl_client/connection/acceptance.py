"""Asks a coordinator whether it accepts this device, without a session."""

from __future__ import annotations

from fl_client.connection.transport import GrpcTransport
from fl_common.certificates.pem import Pem
from fl_common.proxies import proxy_for
from protos.fl.v1 import coordinator_pb2 as pb


async def ask(server: str, client_id: str, tls: Pem | None, *, use_proxy: bool) -> None:
    """Register with a protocol version that does not exist.

    A coordinator checks certificate and name first, and then refuses with its supported versions. No session is opened,
    so a running daemon of the same identity is not fenced.

    Raises:
        ProtocolMismatch: the device is accepted.
        Revoked: its certificate is revoked.
        NotAllowed: it is not accepted for another reason.
        TransportError: there is no answer.
    """
    transport = GrpcTransport(server, tls, proxy=proxy_for(server, use_proxy))
    try:
        await transport.register(pb.RegisterRequest(client_id=client_id, protocol=pb.ProtocolRange()))
    finally:
        await transport.close()
