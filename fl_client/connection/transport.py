"""The rpcs of a daemon's connection over grpc.aio, with failures mapped to the daemon's errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import grpc
import grpc.aio
import structlog
from google.protobuf.message import Message

from fl_client.connection.messages import InvalidMessage, M, log_text, parse
from fl_client.connection.transport_errors import error_of
from fl_client.errors import BrokenTransfer, Refused, Unreachable
from fl_common.certificates.pem import Pem, fingerprints
from fl_common.proxies import Proxy, channel_options
from fl_common.tracing.traces import UNTRACED, Traces
from protos.chunks import ReadChunk, is_chunk, read_chunk
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import enrollment_pb2, training_pb2
from protos.wire import KEEPALIVE_SECONDS, MAX_MESSAGE_BYTES, client_options

SECONDS = 30.0
"""Timeout of one call."""


class GrpcEnrollment:
    """The coordinator's service Enrollment. Every call has a connection of its own, because a device makes few of them.

    Every call raises a TransportError when it fails.
    """

    def __init__(self, address: str, authority: bytes, proxy: Proxy | None = None) -> None:
        """authority: trusted roots, PEM."""
        self._address, self._authority, self._proxy = address, authority, proxy

    async def enroll(self, request: enrollment_pb2.EnrollRequest) -> enrollment_pb2.IssuedCertificate:
        """A certificate for a token."""
        return (await self._call("Enroll", request, enrollment_pb2.EnrollResponse)).issued

    async def reenroll(self, request: enrollment_pb2.ReenrollRequest) -> enrollment_pb2.IssuedCertificate:
        """A certificate for an expired one."""
        return (await self._call("Reenroll", request, enrollment_pb2.ReenrollResponse)).issued

    async def _call(self, method: str, request: Message, response: type[M]) -> M:
        credentials = grpc.ssl_channel_credentials(self._authority)
        options = list({**dict(client_options()), **channel_options(self._proxy)}.items())
        async with grpc.aio.secure_channel(self._address, credentials, options=options) as channel:
            rpc: grpc.aio.UnaryUnaryMultiCallable[Message, bytes]
            rpc = channel.unary_unary(f"/fl.v1.Enrollment/{method}", type(request).SerializeToString, None)
            try:
                return parse(await rpc(request, timeout=SECONDS), response)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:  # final here: the answer to a token or a proof
                    raise Refused(log_text(error.details() or error.code().name)) from error
                raise error_of(error, self._proxy) from error
            except InvalidMessage as error:
                raise Unreachable(str(error)) from error


log = structlog.get_logger()

Fetched = pb.FetchModelResponse | ReadChunk
"""A part of a resource. A chunk is read in place, or parsed by protobuf if it has another encoding."""

EVENT_BYTES = 1 << 20
"""Largest event: the keys of all clients of a cohort, with their certificates."""
_AUTHORITIES = 12
"""Authorities that a coordinator takes the names of."""
_OF_DATA = frozenset({"FetchModel", "SubmitUpdate", "QueryUpload"})
"""Methods that move model bytes."""
CALL_SECONDS = 20.0
"""Timeout of one short call. Streams rely on keepalive instead."""


class GrpcTransport:
    """A connection to a coordinator. Every call raises a TransportError when it fails.

    It is one TCP connection, a new one for each try, and another one if model bytes have an address of their own.

    The daemon waits between tries, not grpc.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what a connection needs
        self,
        address: str,
        tls: Pem | None = None,
        traces: Traces = UNTRACED,
        proxy: Proxy | None = None,
        keepalive_s: float = KEEPALIVE_SECONDS,
    ) -> None:
        self._address, self._tls, self._traces, self._proxy = address, tls, traces, proxy
        self._options = list({**dict(client_options(keepalive_s)), **channel_options(proxy)}.items())
        self._channel = self._data = self._opened(address)
        self._data_address = ""
        self._unused: list[grpc.aio.Channel] = []
        """Earlier connections for model bytes; calls in progress end there."""

    def _opened(self, address: str) -> grpc.aio.Channel:
        settings: dict[str, Any] = {"options": self._options, "interceptors": list(self._traces.client_interceptors())}
        if self._tls is None:
            return grpc.aio.insecure_channel(address, **settings)
        credentials = grpc.ssl_channel_credentials(self._tls.ca, self._tls.key, self._tls.cert)
        return grpc.aio.secure_channel(address, credentials, **settings)

    def move_data_to(self, address: str) -> None:
        """Fetch, submit and query uploads there from now on: host:port, ":port" for the same host, or "": here."""
        if address.startswith(":"):
            address = self._address.rpartition(":")[0] + address
        if address != self._data_address:
            self._unused, self._data_address = [*self._unused, self._data], address
            self._data = self._opened(address) if address else self._channel

    async def register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        """Open a session."""
        return await self.call(request, pb.RegisterResponse)

    async def attend(self, session_id: str, asked: pb.AttendRequest) -> AsyncGenerator[pb.AttendResponse, None]:
        """Events of a session: first the answers to what is asked. An event that cannot be parsed is empty.

        Ends when the coordinator ends the stream.
        """
        trusted = None if self._tls is None else self._tls.ca
        authorities = [] if trusted is None else [bytes.fromhex(name) for name in fingerprints(trusted)[:_AUTHORITIES]]
        request = pb.AttendRequest(session_id=session_id, authorities=authorities)
        request.MergeFrom(asked)
        async for raw in self._stream("Attend", request):
            yield _event(raw)

    async def fetch(self, request: pb.FetchModelRequest, header_bytes: int) -> AsyncGenerator[Fetched, None]:
        """A resource from an offset: a header of at most `header_bytes`, then chunks."""
        async for raw in self._stream("FetchModel", request):
            yield _fetched(raw, header_bytes)

    async def submit(self, parts: AsyncIterator[bytes]) -> training_pb2.Receipt:
        """Serialized SubmitUpdateRequest messages, sent as fast as the coordinator takes them."""
        rpc: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = self._channel_of("SubmitUpdate").stream_unary(
            _path("SubmitUpdate"), request_serializer=None, response_deserializer=None
        )
        with self._mapped():
            return parse(await rpc(parts), pb.SubmitUpdateResponse).receipt

    async def renew(self, request: enrollment_pb2.RenewRequest) -> enrollment_pb2.RenewResponse:
        """A new certificate for this device."""
        return await self.call(request, enrollment_pb2.RenewResponse, "Certificates")

    async def call(self, request: Message, response: type[M], service: str = "Coordinator") -> M:
        """The answer to a request of a short call, whose name is that of the request."""
        method = request.DESCRIPTOR.name.removesuffix("Request")
        # grpc logs a traceback for every error of a deserializer, so the bytes are parsed here.
        rpc: grpc.aio.UnaryUnaryMultiCallable[Message, bytes]
        rpc = self._channel_of(method).unary_unary(_path(method, service), _serialized, None)
        with self._mapped():
            return parse(await rpc(request, timeout=CALL_SECONDS), response)

    async def close(self) -> None:
        """Close the connection. Calls in progress fail."""
        for channel in {self._channel, self._data, *self._unused}:
            await channel.close()

    def _channel_of(self, method: str) -> grpc.aio.Channel:
        return self._data if method in _OF_DATA else self._channel

    async def _stream(self, method: str, request: Message) -> AsyncGenerator[bytes, None]:
        rpc: grpc.aio.UnaryStreamMultiCallable[Message, bytes]
        rpc = self._channel_of(method).unary_stream(_path(method), _serialized, None)
        with self._mapped():
            call = rpc(request)
        try:
            while True:
                with self._mapped():
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return
                yield cast(bytes, message)
        finally:
            call.cancel()

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self._proxy) from error
        except InvalidMessage as error:
            raise Unreachable(str(error)) from error
        except grpc.aio.UsageError as error:
            raise Unreachable("the connection is closed") from error
        except asyncio.CancelledError:
            # grpc.aio cancels the calls of a closed channel. That must not look like a cancelled task.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unreachable("the connection was closed") from None


def _event(raw: bytes) -> pb.AttendResponse:
    try:
        return parse(raw, pb.AttendResponse, EVENT_BYTES)
    except InvalidMessage as error:
        log.warning("event_ignored", reason=str(error))
        return pb.AttendResponse()


def _fetched(raw: bytes, header_bytes: int) -> Fetched:
    """A chunk in any encoding, or a header. Raises BrokenTransfer."""
    try:
        return read_chunk(raw) or parse(
            raw, pb.FetchModelResponse, MAX_MESSAGE_BYTES if is_chunk(raw) else header_bytes
        )
    except InvalidMessage as error:
        raise BrokenTransfer(str(error)) from None


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


def _path(method: str, service: str = "Coordinator") -> str:
    return f"/fl.v1.{service}/{method}"
