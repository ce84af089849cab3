"""The answers of a coordinator, as the daemon reads them: registrations, events, downloads, receipts and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import grpc.aio
import torch
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status

from algorithms.base import LocalSettings
from fl_client.assignments.checks import (
    InvalidEvent,
    check_assignment,
    check_resources,
    checked_key,
    checked_outcome,
    checked_run,
)
from fl_client.assignments.deadline import seconds_for
from fl_client.connection import transport
from fl_client.connection.bundles.download import Differences, Download
from fl_client.connection.bundles.expected import ExpectedBundle, ExpectedBundles
from fl_client.connection.link import Backoff, Link, RetryDelays, Session
from fl_client.connection.messages import InvalidMessage, log_text, parse, seconds_of
from fl_client.connection.session import check_registration, requested_events, session_of
from fl_client.connection.transport_errors import error_of
from fl_client.errors import TransportError, WorkFailed
from fl_client.settings.config import LimitsConfig
from fl_client.storage.device_storage import DeviceStorage
from fl_client.storage.pending_updates import name_of, work_digest
from fl_client.training.payloads import exchange_of, method_of
from protos.buffers import BufferPool, zeros
from protos.chunks import encode_chunk, encode_fetch_header
from protos.differences import WORD_BYTES, DifferenceError, apply_difference, make_difference
from protos.digests import digest_message, digest_of
from protos.encodings import PLAIN, EncodedLayout
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2, tensor_pb2, training_pb2
from protos.status import STATUS_DETAILS_KEY, detail_of, status_metadata
from protos.wire import MAX_MESSAGE_BYTES
from tests.fuzz.examples import DATA, LAYOUT, RUN, assignment, examples, resource
from tests.fuzz.mutation import Seed, Stream, parts_of
from tests.fuzz.parser import Parser


def parsers(folder: Path, opened: ExitStack) -> Iterator[Parser]:
    """One for each kind of answer."""
    storage = DeviceStorage(folder / "pending", folder / "states")
    loop = asyncio.new_event_loop()
    opened.callback(loop.close)
    yield Parser("daemon.register", _registrations(), _register, (InvalidMessage, TransportError), weight=2)
    yield Parser("daemon.event", _events(), lambda raw: _event(raw, storage), (InvalidEvent, WorkFailed), weight=8)
    yield Parser("daemon.fetched", _fetched_seeds(), _fetched, (TransportError, WorkFailed), weight=2)
    yield Parser(
        "daemon.download", [Stream(_fetched_seeds())], lambda raw: loop.run_until_complete(_download(raw)),
        (TransportError, WorkFailed), weight=3,
    )  # fmt: skip
    yield Parser("daemon.difference", _difference_seeds(), _difference, (DifferenceError,), weight=2)
    yield Parser(
        "daemon.bundle", [Stream(_described_seeds())], lambda raw: loop.run_until_complete(_bundle(raw)),
        (InvalidMessage, WorkFailed), weight=3,
    )  # fmt: skip
    yield Parser("daemon.receipt", examples(pb.SubmitUpdateResponse.DESCRIPTOR), _receipt, (InvalidMessage,))
    yield Parser("daemon.query", examples(pb.QueryUploadResponse.DESCRIPTOR), _query, (InvalidMessage,))
    yield Parser("daemon.error", _details(), _error, weight=2)


def _request() -> pb.RegisterRequest:
    request = cast(pb.RegisterRequest, examples(pb.RegisterRequest.DESCRIPTOR)[0])
    request.pending.append(training_pb2.ExchangeKey(run_id=RUN, round=1))
    return request


def _registrations() -> list[Seed]:
    return [*examples(pb.RegisterResponse.DESCRIPTOR), pb.RegisterResponse(session_id="s", protocol=1)]


def _register(raw: bytes) -> None:
    response, request = parse(raw, pb.RegisterResponse), _request()
    check_registration(response, request)
    session = session_of(response, cast(transport.GrpcTransport, SimpleNamespace(move_data_to=str)))
    assert 0 < session.chunk_bytes <= session.max_chunk_bytes <= MAX_MESSAGE_BYTES
    for event in requested_events(response, request):
        transport._event(event.SerializeToString())


def _events() -> list[Seed]:
    return [pb.AttendResponse(assignment=assignment()), *examples(pb.AttendResponse.DESCRIPTOR)]


def _event(raw: bytes, storage: DeviceStorage) -> None:
    """All that is decided about an event before anything is fetched."""
    event = transport._event(raw)
    match event.WhichOneof("event"):
        case "assignment":
            _assignment(event.assignment)
        case "evaluation":
            checked_key(event.evaluation.key)
            work_digest(event.evaluation)
            seconds_for(event.evaluation, 60.0)
            check_resources(event.evaluation)
        case "outcome":
            checked_outcome(event.outcome)
            storage.settle(event.outcome)
        case "cancel":
            checked_key(event.cancel.key)
            name_of(training_pb2.RefusalReason, event.cancel.reason)
        case "run_ended":
            checked_run(event.run_ended.run_id)
        case "retry":
            assert RetryDelays().longest >= 0
            Backoff(RetryDelays()).after(seconds_of(event.retry.wait))
        case "notice":
            log_text(event.notice.text)
        case _:
            pass


def _assignment(came: training_pb2.Assignment) -> None:
    checked_key(came.key)
    work_digest(came)
    assert 0 <= seconds_for(came, 60.0) <= 60.0
    check_assignment(came, LimitsConfig(), examples=100)
    exchange_of(came, method_of(came.training))
    LocalSettings(came.training.learning_rate, came.training.weight_decay, came.training.max_gradient_norm)


def _fetched_seeds() -> list[Message | bytes]:
    chunks = [encode_chunk(DATA, start, min(64, len(DATA) - start)) for start in range(0, len(DATA), 64)]
    return [pb.FetchModelResponse.FromString(encode_fetch_header(resource(), LAYOUT.to_manifest())), *chunks]


def _fetched(raw: bytes) -> None:
    transport._fetched(raw, 1 << 16)


class _Sent:
    """A connection that answers each fetch with the parts of an input."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    async def fetch(self, request: pb.FetchModelRequest, header_bytes: int) -> AsyncGenerator[transport.Fetched, None]:
        for part in self._parts:
            yield transport._fetched(part, header_bytes)


async def _download(raw: bytes) -> None:
    expected = ExpectedBundle(resource(), EncodedLayout.of(LAYOUT, PLAIN))
    download = Download(expected, zeros(len(DATA)), Backoff(RetryDelays()), lambda count: None)
    session = Session("s", cast(transport.GrpcTransport, _Sent(list(parts_of(raw)))), 1 << 16, 1 << 20)
    await download.resume(session)
    assert download.described


BASE = bytes(byte ^ (at % 16 == 0) for at, byte in enumerate(DATA))
"""The bundle of the round before."""


def _difference_seeds() -> list[Seed]:
    """A byte for the size of a word, and a difference."""
    return [bytes([number]) + _difference_of(word) for number, word in enumerate(WORD_BYTES)]


def _difference_of(word: int) -> bytes:
    found = make_difference(BASE, DATA, word)
    assert found is not None
    return found


def _difference(raw: bytes) -> None:
    word = WORD_BYTES[raw[0] % len(WORD_BYTES)] if raw else 1
    apply_difference(BASE, raw[1:], word, zeros(len(DATA)))


def _described_seeds() -> list[Message | bytes]:
    """A resource with its difference, and the messages of the difference."""
    data, described = _difference_of(4), resource()
    described.difference.CopyFrom(
        tensor_pb2.Difference(
            base=digest_message(LAYOUT.digest(BASE)),
            digest=digest_message(digest_of(data)),
            size_bytes=len(data),
            word_bytes=4,
        )
    )
    manifest = tensor_pb2.Manifest(size_bytes=len(data), encoding=tensor_pb2.ENCODING_PLAIN)
    header = pb.FetchModelResponse.FromString(encode_fetch_header(resource(), manifest))
    half = len(data) // 2
    return [described, header, encode_chunk(data, 0, half), encode_chunk(data, half, len(data) - half)]


async def _bundle(raw: bytes) -> None:
    """The bundle of a described resource, from a kept base and what comes as its difference."""
    first, *messages = list(parts_of(raw)) or [b""]
    expected = ExpectedBundles(1 << 20).of(parse(first, tensor_pb2.Resource), {tensor_pb2.RESOURCE_KIND_MODEL: LAYOUT})
    link = Link(RetryDelays(first=1e-6, longest=1e-6))
    link.open(Session("s", cast(transport.GrpcTransport, _Sent(messages)), 1 << 16, 1 << 20))
    differences = Differences(link, BufferPool(), lambda count: None)
    base = tensor_pb2.Resource(
        kind=tensor_pb2.RESOURCE_KIND_MODEL, digest=digest_message(LAYOUT.digest(BASE)), is_base=True
    )
    differences.keep(base, memoryview(BASE))
    made = await differences.bundle(expected)
    assert made is None or LAYOUT.digest(made) == expected.digest.value


def _receipt(raw: bytes) -> None:
    receipt = parse(raw, pb.SubmitUpdateResponse).receipt
    name_of(training_pb2.RefusalReason, receipt.reason)
    log_text(receipt.detail)
    assert receipt.key.ByteSize() >= 0


def _query(raw: bytes) -> None:
    assert min(parse(raw, pb.QueryUploadResponse).kept_bytes, len(DATA)) <= len(DATA)


def _details() -> list[Seed]:
    found: list[Seed] = []
    for kind in errors_pb2.DESCRIPTOR.message_types_by_name.values():
        ((_, packed),) = status_metadata(14, "a reason", examples(kind)[0])
        found.append(Status.FromString(packed))
    return found


def _error(raw: bytes) -> None:
    """The daemon's error for a failed call with these details, for any code."""
    detail_of([(STATUS_DETAILS_KEY, raw)])
    codes = list(grpc.StatusCode)
    code = codes[len(raw) % len(codes)]
    metadata = grpc.aio.Metadata((STATUS_DETAILS_KEY, raw))
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=raw.decode("latin-1"))
    assert isinstance(error_of(error), TransportError)


torch.set_num_threads(1)
