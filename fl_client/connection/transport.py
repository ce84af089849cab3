"""The rpcs of the Coordinator service over grpc.aio, with failures mapped to the daemon's errors.

No other module of the daemon imports grpc.
"""

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

from fl_client.connection.messages import InvalidMessage, log_text, parse, seconds_of
from fl_client.errors import (
    BrokenTransfer,
    Contested,
    FailedCall,
    Fenced,
    NotAllowed,
    ProtocolMismatch,
    Refused,
    ResourceGone,
    SessionLost,
    TransportError,
    Unreachable,
)
from fl_common.pem import Pem
from fl_common.tracing import UNTRACED, Traces
from protos.chunks import ReadChunk, is_chunk, read_chunk
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2, training_pb2
from protos.status import detail_of
from protos.wire import MAX_MESSAGE_BYTES, client_options

log = structlog.get_logger()

Fetched = pb.FetchModelResponse | ReadChunk
"""A part of a resource. A chunk is read in place, or parsed by protobuf if it has another encoding."""

CALL_SECONDS = 20.0
"""Timeout of one short call. Streams rely on keepalive instead."""


class Connection(Protocol):
    """One connection to a coordinator. Every call raises a TransportError when it fails."""

    async def register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        """Open a session."""
        ...

    def attend(self, session_id: str) -> AsyncGenerator[pb.AttendResponse, None]:
        """Events of a session. An event that cannot be parsed is empty. Ends when the coordinator ends the stream."""
        ...

    def fetch(self, request: pb.FetchModelRequest, header_bytes: int) -> AsyncGenerator[Fetched, None]:
        """A resource from an offset: a header of at most `header_bytes`, then chunks."""
        ...

    async def submit(self, parts: AsyncIterator[bytes]) -> training_pb2.Receipt:
        """Serialized SubmitUpdateRequest messages, sent as fast as the coordinator takes them."""
        ...

    async def query_upload(self, request: pb.QueryUploadRequest) -> pb.QueryUploadResponse:
        """The bytes that the coordinator has kept of an upload, or its receipt."""
        ...

    async def report_status(self, request: pb.ReportStatusRequest) -> None:
        """Availability and failures."""
        ...

    async def report_evaluation(self, request: pb.ReportEvaluationRequest) -> None:
        """The answer to an evaluation assignment."""
        ...

    async def close(self) -> None:
        """Close the connection. Calls in progress fail."""
        ...


Connect = Callable[[], Connection]
"""Makes a new connection. Nothing is sent before its first call."""


class GrpcTransport:
    """One TCP connection, a new one for each try. The daemon waits between tries, not grpc."""

    def __init__(self, address: str, tls: Pem | None = None, traces: Traces = UNTRACED) -> None:
        settings: dict[str, Any] = {
            "options": list(client_options()),
            "interceptors": list(traces.client_interceptors()),
        }
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, **settings)
        else:
            credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
            self._channel = grpc.aio.secure_channel(address, credentials, **settings)

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
            return parse(await rpc(parts), pb.SubmitUpdateResponse).receipt

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
        # grpc logs a traceback for every error of a deserializer, so the bytes are parsed here.
        rpc: grpc.aio.UnaryUnaryMultiCallable[Message, bytes]
        rpc = self._channel.unary_unary(_path(method), _serialized, None)
        with self._mapped():
            return parse(await rpc(request, timeout=CALL_SECONDS), response)

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
        return parse(raw, pb.AttendResponse)
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


def _path(method: str) -> str:
    return f"/fl.v1.Coordinator/{method}"


def _error_of(error: grpc.aio.AioRpcError) -> TransportError:
    """The daemon's error for a failed call: by its detail, else by its status code."""
    message = log_text(error.details() or error.code().name)
    detail = detail_of(error.trailing_metadata())
    if isinstance(detail, errors_pb2.SessionFenced):
        return Fenced(message, detail.by_other_instance)
    if isinstance(detail, errors_pb2.ProtocolMismatch):
        return ProtocolMismatch(message, (detail.server.min, detail.server.max))
    if isinstance(detail, errors_pb2.RetryLater):
        later = Contested if error.code() is grpc.StatusCode.ABORTED else Unreachable
        return later(message, seconds_of(detail.wait))
    if (kind := _BY_DETAIL.get(type(detail))) is not None:
        return kind(message)
    if error.code() in _PERMANENT:
        return Refused(f"{error.code().name}: {message}")
    explained = _explained(message)
    return FailedCall(f"{error.code().name}: {explained}") if error.code() in _FAULTS else Unreachable(explained)


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

_FAULTS = frozenset(
    {
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Answers of a server that runs and fails in this call. A retry helps only where the cause was temporary."""

_CLOSED_IN_HANDSHAKE = (
    "the connection was closed in the TLS handshake, before a certificate was checked: the coordinator is starting or"
    " ending, a proxy or port-forward in between has lost it, or another program listens there"
)
_EXPIRED = (
    "the coordinator's certificate, or that of its authority, has ended: its operator renews it with `fl ca renew`, or"
    " the clock of this device is wrong"
)
_NOT_YET = (
    "the coordinator's certificate, or that of its authority, is not valid yet: is the clock of this device right, and"
    " that of the authority?"
)
_OTHER_HOST = (
    "the coordinator's certificate is for another host name: set server to a name of the certificate (`fl-client"
    " doctor` lists them), or issue it for this name too, `fl ca issue server --host NAME`"
)

_EXPLANATIONS = (
    ("Connection refused", "the port is closed; is the coordinator running?"),
    ("CERTIFICATE_VERIFY_FAILED: certificate has expired", _EXPIRED),
    ("CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", _NOT_YET),
    ("CERTIFICATE_VERIFY_FAILED", "the coordinator's certificate is not signed by tls.ca"),
    ("Hostname Verification Check failed", _OTHER_HOST),
    ("WRONG_VERSION_NUMBER", "the coordinator uses plain text, this daemon TLS: remove [tls] here or add it there"),
    ("not match", _OTHER_HOST),
    ("SSLV3_ALERT_HANDSHAKE_FAILURE", "no TLS 1.3 at the server or a proxy: see tls.min_version in the configuration"),
    ("CERTIFICATE_REQUIRED", "the coordinator requires a client certificate that its CA signed"),
    ("UNKNOWN_CA", "the coordinator does not know the CA that signed tls.cert"),
    ("Invalid cert chain file", "tls.cert is not a certificate in PEM"),
    ("Invalid private key", "tls.key is not the private key of tls.cert"),
    ("Handshake (read|write) failed", _CLOSED_IN_HANDSHAKE),
    ("DNS resolution failed", "the host name is not known"),
    ("Domain name not found", "the host name is not known"),
    ("Method not found|unimplemented", "the server is not a coordinator"),
    (
        "failed to connect.*Socket closed",
        "the server closes the connection; does it use TLS, and know this device's CA?",
    ),
    ("Expected SETTINGS frame as the first frame", "the server is not a coordinator"),
    ("Trying to connect an http1.x server", "the server is not a coordinator, or it accepts TLS only"),
)


def _explained(message: str) -> str:
    """grpc's message, with an explanation in front where there is one. The text decides nothing else."""
    return next((f"{words} ({message})" for pattern, words in _EXPLANATIONS if re.search(pattern, message)), message)
