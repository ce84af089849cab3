"""The wire: rpcs of the Coordinator service over grpc.aio, failures as our own errors. Only this file knows grpc."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import grpc
import grpc.aio
import structlog
from google.protobuf.message import Message

from fl_client.connection.reading import UnreadableMessage, parsed, seconds_of, text
from fl_client.errors import (
    BrokenTransfer,
    Contested,
    Fenced,
    NotAllowed,
    ProtocolMismatch,
    Refused,
    ResourceGone,
    SessionLost,
    TransportError,
    Unreachable,
)
from protos.chunks import ReadChunk, is_chunk, read_chunk
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2, training_pb2
from protos.pem import Pem
from protos.status import detail_of
from protos.traces import UNTRACED, Traces
from protos.wire import MAX_MESSAGE_BYTES, client_options

log = structlog.get_logger()

Fetched = pb.FetchModelResponse | ReadChunk
"""A part of a resource; a chunk is read where it lies, or by protobuf if it is encoded in another way."""

CALL_SECONDS = 20.0
"""Patience with one short call; streams are watched over by keepalive instead."""


class Connection(Protocol):
    """One connection to a coordinator. Every call raises a TransportError when it fails."""

    async def register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        """Open a session."""
        ...

    def attend(self, session_id: str) -> AsyncGenerator[pb.AttendResponse, None]:
        """Events of a session, an empty one for one that cannot be read; ends when the coordinator ends the stream."""
        ...

    def fetch(self, request: pb.FetchModelRequest, header_bytes: int) -> AsyncGenerator[Fetched, None]:
        """A resource from an offset: a header of at most so many bytes, then chunks."""
        ...

    async def submit(self, parts: AsyncIterator[bytes]) -> training_pb2.Receipt:
        """Serialized SubmitUpdateRequest messages, sent as fast as the coordinator takes them."""
        ...

    async def query_upload(self, request: pb.QueryUploadRequest) -> pb.QueryUploadResponse:
        """How far an upload came."""
        ...

    async def report_status(self, request: pb.ReportStatusRequest) -> None:
        """Availability and failures."""
        ...

    async def report_evaluation(self, request: pb.ReportEvaluationRequest) -> None:
        """The answer to an evaluation assignment."""
        ...

    async def close(self) -> None:
        """Let go of the connection; calls under way fail."""
        ...


Connect = Callable[[], Connection]
"""Makes a new connection; nothing is sent before its first call."""


class GrpcTransport:
    """One TCP connection, a new one for each try: waiting between tries is the daemon's, not grpc's."""

    def __init__(self, address: str, tls: Pem | None = None, traces: Traces = UNTRACED) -> None:
        how: dict[str, Any] = {"options": list(client_options()), "interceptors": list(traces.client_interceptors())}
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, **how)
        else:
            credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
            self._channel = grpc.aio.secure_channel(address, credentials, **how)

    async def register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        """See Connection."""
        response: pb.RegisterResponse = await self._call("Register", request, pb.RegisterResponse)
        return response

    async def attend(self, session_id: str) -> AsyncGenerator[pb.AttendResponse, None]:
        """See Connection."""
        async for raw in self._stream("Attend", pb.AttendRequest(session_id=session_id)):
            yield _event(raw)

    async def fetch(self, request: pb.FetchModelRequest, header_bytes: int) -> AsyncGenerator[Fetched, None]:
        """See Connection."""
        async for raw in self._stream("FetchModel", request):
            yield _fetched(raw, header_bytes)

    async def submit(self, parts: AsyncIterator[bytes]) -> training_pb2.Receipt:
        """See Connection."""
        rpc: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = self._channel.stream_unary(
            _path("SubmitUpdate"), request_serializer=None, response_deserializer=None
        )
        with self._mapped():
            return parsed(await rpc(parts), pb.SubmitUpdateResponse).receipt

    async def query_upload(self, request: pb.QueryUploadRequest) -> pb.QueryUploadResponse:
        """See Connection."""
        response: pb.QueryUploadResponse = await self._call("QueryUpload", request, pb.QueryUploadResponse)
        return response

    async def report_status(self, request: pb.ReportStatusRequest) -> None:
        """See Connection."""
        await self._call("ReportStatus", request, pb.ReportStatusResponse)

    async def report_evaluation(self, request: pb.ReportEvaluationRequest) -> None:
        """See Connection."""
        await self._call("ReportEvaluation", request, pb.ReportEvaluationResponse)

    async def close(self) -> None:
        """See Connection."""
        await self._channel.close()

    async def _call(self, method: str, request: Message, response: type[Message]) -> Any:
        # A deserializer that raises is logged by grpc with a traceback, each time; so bytes are read here.
        rpc: grpc.aio.UnaryUnaryMultiCallable[Message, bytes]
        rpc = self._channel.unary_unary(_path(method), _serialized, None)
        with self._mapped():
            return parsed(await rpc(request, timeout=CALL_SECONDS), response)

    async def _stream(self, method: str, request: Message) -> AsyncGenerator[bytes, None]:
        rpc: grpc.aio.UnaryStreamMultiCallable[Message, bytes]
        rpc = self._channel.unary_stream(_path(method), _serialized, None)
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
            raise _error_of(error) from error
        except UnreadableMessage as error:
            raise Unreachable(str(error)) from error
        except grpc.aio.UsageError as error:
            raise Unreachable("the connection is closed") from error
        except asyncio.CancelledError:
            # grpc.aio cancels the calls of a closed channel; that must not look like the end of the task.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unreachable("the connection was closed") from None


def _event(raw: bytes) -> pb.AttendResponse:
    try:
        return parsed(raw, pb.AttendResponse)
    except UnreadableMessage as error:
        log.warning("event_ignored", reason=str(error))
        return pb.AttendResponse()


def _fetched(raw: bytes, header_bytes: int) -> Fetched:
    """A chunk, however it is encoded, or a header. Raises BrokenTransfer."""
    try:
        return read_chunk(raw) or parsed(
            raw, pb.FetchModelResponse, MAX_MESSAGE_BYTES if is_chunk(raw) else header_bytes
        )
    except UnreadableMessage as error:
        raise BrokenTransfer(str(error)) from None


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


def _path(method: str) -> str:
    return f"/fl.v1.Coordinator/{method}"


def _error_of(error: grpc.aio.AioRpcError) -> TransportError:
    """Our error for a failed call: by the detail that came with it, else by its code."""
    said = text(error.details() or error.code().name)
    detail = detail_of(error.trailing_metadata())
    if isinstance(detail, errors_pb2.SessionFenced):
        return Fenced(said, detail.by_other_instance)
    if isinstance(detail, errors_pb2.ProtocolMismatch):
        return ProtocolMismatch(said, (detail.server.min, detail.server.max))
    if isinstance(detail, errors_pb2.RetryLater):
        later = Contested if error.code() is grpc.StatusCode.ABORTED else Unreachable
        return later(said, seconds_of(detail.wait))
    if (kind := _BY_DETAIL.get(type(detail))) is not None:
        return kind(said)
    if error.code() in _PERMANENT:
        return Refused(f"{error.code().name}: {said}")
    return Unreachable(_in_words(said))


_BY_DETAIL: dict[type, type[TransportError]] = {
    errors_pb2.UnknownSession: SessionLost,
    errors_pb2.NotAllowed: NotAllowed,
    errors_pb2.UnknownResource: ResourceGone,
    errors_pb2.BrokenUpload: BrokenTransfer,
}

_PERMANENT = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)

_WORDS = (
    ("Connection refused", "nobody listens there; is the coordinator running?"),
    ("CERTIFICATE_VERIFY_FAILED", "the coordinator's certificate is not signed by tls.ca, or not for this host name"),
    ("WRONG_VERSION_NUMBER", "the coordinator speaks plain text, this daemon TLS: remove [tls] here or add it there"),
    ("not match", "the coordinator's certificate is for another host name"),
    ("CERTIFICATE_REQUIRED", "the coordinator wants a client certificate that its CA signed"),
    ("UNKNOWN_CA", "the coordinator does not know the CA that signed tls.cert"),
    ("Invalid cert chain file", "tls.cert is not a certificate in PEM"),
    ("Invalid private key", "tls.key is not the private key of tls.cert"),
    ("DNS resolution failed", "the host name is not known"),
    ("Domain name not found", "the host name is not known"),
    ("Method not found|unimplemented", "what answers there is not a coordinator"),
    (
        "failed to connect.*Socket closed",
        "what answers closes the connection; does it speak TLS, and know this device's CA?",
    ),
    ("Expected SETTINGS frame as the first frame", "what answers there is not a coordinator"),
    ("Trying to connect an http1.x server", "what answers there is not a coordinator, or it speaks TLS only"),
)


def _in_words(said: str) -> str:
    """grpc's own text, with what it means in front where we know it."""
    return next((f"{words} ({said})" for sign, words in _WORDS if re.search(sign, said)), said)
