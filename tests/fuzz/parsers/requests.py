"""The requests of every method of every service, as the interceptor parses them, and the messages of uploads."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from fl_server.admission.client_rules import UpdateRefused
from fl_server.admission.gate import AdmissionGate
from fl_server.aggregation.updates import PayloadShape, UpdateShape
from fl_server.clients.registration import check_sizes, common_protocol, record_of
from fl_server.errors import InvalidInput, NoCommonProtocol
from fl_server.pages import Cursor, Page
from fl_server.rpc.call_limits import parse, parse_request
from fl_server.run_settings.spec import from_spec, from_stored, to_spec
from fl_server.uploads.stream import chunk_of, part_of, trailer_of
from protos.chunks import ChunkError, ReadChunk, check_chunk
from protos.codec import Layout, LayoutError, digest_bytes
from protos.fl.v1 import admin_pb2, coordinator_pb2, enrollment_pb2, tensor_pb2, training_pb2
from tests.fuzz.examples import DATA, LAYOUT, RUN, examples, header, upload_parts
from tests.fuzz.mutation import Seed
from tests.fuzz.parser import Parser

SERVICES = [
    *coordinator_pb2.DESCRIPTOR.services_by_name.values(),
    *admin_pb2.DESCRIPTOR.services_by_name.values(),
    *enrollment_pb2.DESCRIPTOR.services_by_name.values(),
    *health_pb2.DESCRIPTOR.services_by_name.values(),
    *reflection_pb2.DESCRIPTOR.services_by_name.values(),
]
"""The services of a coordinator."""


def parsers(folder: Path, opened: ExitStack) -> Iterator[Parser]:
    """One for each method, and those behind them."""
    for service in SERVICES:
        for method in service.methods:
            yield _of_method(f"/{service.full_name}/{method.name}", method.input_type)
    yield Parser("upload_part", upload_parts(), _upload_part, (InvalidInput, ChunkError), weight=4)
    yield Parser("manifest", [LAYOUT.to_manifest()], _manifest, (LayoutError, InvalidInput), weight=3)
    yield Parser("update_header", [header()], _header, (UpdateRefused, InvalidInput), weight=3)
    yield Parser("run_spec", examples(admin_pb2.RunSpec.DESCRIPTOR), _run_spec, (InvalidInput,))
    yield Parser("registration", examples(coordinator_pb2.RegisterRequest.DESCRIPTOR), _registration, _NOT_REGISTERED)
    yield Parser("digest", examples(tensor_pb2.Digest.DESCRIPTOR), _digest, (InvalidInput, ValueError))
    yield Parser("page_token", _tokens(), _page_token, (InvalidInput,))


def _of_method(method: str, kind: object) -> Parser:
    message = GetMessageClass(kind)  # type: ignore[arg-type]  # the C implementation has its own type

    def call(raw: bytes) -> object:
        return parse(method, raw, message.FromString)

    return Parser(f"request{method.replace('/', '.')}", examples(kind), call, (InvalidInput,))


def _upload_part(raw: bytes) -> None:
    """As SubmitUpdate reads it; a chunk that is read in place has the same meaning for protobuf."""
    request = parse_request(raw)
    part_of(request)
    trailer = trailer_of(request)
    if isinstance(request, ReadChunk):
        same = coordinator_pb2.SubmitUpdateRequest.FromString(raw).chunk
        assert (same.offset, same.data, same.crc32c) == (request.offset, bytes(request.data), request.crc32c)
    if trailer is None:
        check_chunk(chunk_of(request), 0, 1 << 20, len(DATA))


def _manifest(raw: bytes) -> None:
    parsed = parse("manifest", raw, tensor_pb2.Manifest.FromString)
    layout = Layout.from_manifest(parsed, 1 << 20)
    assert layout.size_bytes <= 1 << 20
    assert all(0 <= entry.offset <= entry.end <= layout.size_bytes for entry in layout.entries)
    LAYOUT.difference(layout)
    layout.digest(b"")


_SHAPE = UpdateShape((PayloadShape("delta", LAYOUT, 0),))
_GATE = AdmissionGate(_SHAPE, max_bytes=1 << 20, max_norm=1.0, clip_norm=0.0, state_epoch=0)


def _header(raw: bytes) -> None:
    _GATE.check_header(parse("header", raw, training_pb2.UpdateHeader.FromString))


def _run_spec(raw: bytes) -> None:
    config = from_spec(parse("/fl.v1.Admin/CreateRun", raw, admin_pb2.RunSpec.FromString))
    assert from_stored(config.model_dump(mode="json")) == config
    to_spec(config)


_NOT_REGISTERED = InvalidInput, NoCommonProtocol


def _registration(raw: bytes) -> None:
    request = parse("/fl.v1.Coordinator/Register", raw, coordinator_pb2.RegisterRequest.FromString)
    check_sizes(request)
    common_protocol(request.protocol)
    record_of(request, None, None)


def _digest(raw: bytes) -> None:
    assert len(digest_bytes(parse("digest", raw, tensor_pb2.Digest.FromString))) == 32


def _tokens() -> list[Seed]:
    """A token, and the text inside it without its encoding."""
    page: Page[admin_pb2.RunStatus] = Cursor(("runs",), 3, None)._full([], (1.5, RUN))
    return [page.next_token, base64.urlsafe_b64decode(page.next_token).decode()]


def _page_token(raw: bytes) -> None:
    """As text, and as the text inside a well-formed token."""
    for token in (raw.decode("latin-1"), base64.urlsafe_b64encode(raw).decode()):
        with suppress(InvalidInput):
            Cursor.of_request(admin_pb2.ListRunsRequest(page_size=3, page_token=token), (float, str), "runs")
