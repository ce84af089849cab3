"""The calls of a device without a valid certificate, at the coordinator's port for enrollment.

The connection is verified with the given authorities as the only roots. The device itself shows no certificate.
"""

from __future__ import annotations

from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import Message

from fl_client.connection.messages import InvalidMessage, log_text, parse
from fl_client.connection.transport_errors import error_of
from fl_client.errors import Refused, TransportError, Unreachable
from fl_common.proxies import Proxy, channel_options
from protos.fl.v1 import enrollment_pb2 as pb
from protos.wire import client_options

SECONDS = 30.0
"""Timeout of one call."""


class EnrollmentCalls(Protocol):
    """The service Enrollment. Every call raises a TransportError when it fails."""

    async def enroll(self, request: pb.EnrollRequest) -> pb.IssuedCertificate:
        """A certificate for a token."""
        ...

    async def reenroll(self, request: pb.ReenrollRequest) -> pb.IssuedCertificate:
        """A certificate for an expired one."""
        ...


class GrpcEnrollment:
    """Each call has a connection of its own, because a device makes few of them."""

    def __init__(self, address: str, authority: bytes, proxy: Proxy | None = None) -> None:
        """authority: trusted roots, PEM."""
        self._address, self._authority, self._proxy = address, authority, proxy

    async def enroll(self, request: pb.EnrollRequest) -> pb.IssuedCertificate:
        """See EnrollmentCalls."""
        response: pb.EnrollResponse = await self._call("Enroll", request, pb.EnrollResponse)
        return response.issued

    async def reenroll(self, request: pb.ReenrollRequest) -> pb.IssuedCertificate:
        """See EnrollmentCalls."""
        response: pb.ReenrollResponse = await self._call("Reenroll", request, pb.ReenrollResponse)
        return response.issued

    async def _call(self, method: str, request: Message, response: type[Message]) -> Any:
        credentials = grpc.ssl_channel_credentials(self._authority)
        options = list({**dict(client_options()), **channel_options(self._proxy)}.items())
        async with grpc.aio.secure_channel(self._address, credentials, options=options) as channel:
            rpc: grpc.aio.UnaryUnaryMultiCallable[Message, bytes]
            rpc = channel.unary_unary(f"/fl.v1.Enrollment/{method}", type(request).SerializeToString, None)
            try:
                return parse(await rpc(request, timeout=SECONDS), response)
            except grpc.aio.AioRpcError as error:
                raise _enrollment_error(error, self._proxy) from error
            except InvalidMessage as error:
                raise Unreachable(str(error)) from error


def _enrollment_error(error: grpc.aio.AioRpcError, proxy: Proxy | None) -> TransportError:
    """As `error_of`. UNAUTHENTICATED is final here: it is the answer to a token or a proof."""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return Refused(log_text(error.details() or error.code().name))
    return error_of(error, proxy)
