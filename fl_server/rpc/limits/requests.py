"""Limits of the request of each method: its size, its number of values, and its calls at once.

Size and values are checked on the bytes, before protobuf parses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from fl_server.errors import InvalidInput
from fl_server.rpc.limits.wire_count import Malformed, Nested, count_values, nested_of
from protos.fl.v1 import admin_pb2, coordinator_pb2, enrollment_pb2, web_pb2
from protos.wire import MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class RequestLimit:
    """The limits of a method. The defaults are far above every honest request."""

    size_bytes: int = 64 << 10
    """Of the serialized request; for a stream of requests, of each."""
    values: int = 10_000
    """Fields, sub-messages and elements in it, at any depth; each costs up to some hundred bytes once it is parsed."""
    at_once: int = 16
    """Calls of the method by one caller."""


DEFAULT = RequestLimit()
LARGE_BYTES = 256 << 10
"""No honest client sends a refused request above this size."""
_LARGEST_RUN = RequestLimit(size_bytes=1 << 20, values=50_000)
_CERTIFICATE = RequestLimit(size_bytes=16 << 10, values=16, at_once=4)
_WATCH = RequestLimit(size_bytes=1 << 10, values=16, at_once=8)

LIMITS: Mapping[str, RequestLimit] = {
    # A thousand pending keys and states, and 64 labels and tasks with texts of 256 characters, fit into 512 KiB.
    "/fl.v1.Coordinator/Register": RequestLimit(size_bytes=512 << 10, at_once=4),
    "/fl.v1.Coordinator/Attend": RequestLimit(size_bytes=1 << 10, values=16, at_once=8),
    "/fl.v1.Coordinator/FetchModel": RequestLimit(size_bytes=1 << 10, values=16, at_once=8),
    # Chunks, which have their own limit, and one header: `chunk_stream.request_of` counts its values.
    "/fl.v1.Coordinator/SubmitUpdate": RequestLimit(size_bytes=MAX_MESSAGE_BYTES, at_once=8),
    "/fl.v1.Coordinator/QueryUpload": RequestLimit(size_bytes=1 << 10, values=16, at_once=8),
    # 64 failures with 4,000 characters each.
    "/fl.v1.Coordinator/ReportStatus": RequestLimit(size_bytes=1 << 20, values=2_000, at_once=8),
    "/fl.v1.Coordinator/ReportEvaluation": RequestLimit(at_once=8),
    "/fl.v1.Enrollment/Enroll": _CERTIFICATE,
    "/fl.v1.Enrollment/Reenroll": _CERTIFICATE,
    "/fl.v1.Certificates/Renew": _CERTIFICATE,
    "/fl.v1.Admin/CreateRun": _LARGEST_RUN,
    # A thousand tokens with some labels each.
    "/fl.v1.Admin/CreateEnrollments": RequestLimit(size_bytes=1 << 20, values=50_000, at_once=4),
    "/fl.v1.Admin/WatchRun": RequestLimit(at_once=64),
    "/fl.v1.Admin/WatchHistory": RequestLimit(size_bytes=4 << 10, values=16, at_once=64),
    # A chunk of 512 KiB, or a header. The size is that of CreateRun, so the port takes no larger messages than before.
    "/fl.v1.Admin/UploadModel": RequestLimit(size_bytes=1 << 20, values=64, at_once=2),
    **{
        f"/fl.v1.Admin/{method}": RequestLimit(at_once=32)
        for method in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods_by_name
        if method not in {"CreateRun", "CreateEnrollments", "WatchRun", "WatchHistory", "UploadModel"}
    },
    "/fl.v1.WebLogin/GetLink": RequestLimit(size_bytes=1 << 10, values=4, at_once=64),
    "/fl.v1.WebLogin/OpenByCode": RequestLimit(size_bytes=1 << 10, values=4, at_once=64),
    "/fl.v1.WebLogin/OpenByCertificate": RequestLimit(size_bytes=16 << 10, values=4, at_once=64),
    "/fl.v1.WebLogin/CloseSession": RequestLimit(size_bytes=1 << 10, values=4, at_once=64),
    "/grpc.health.v1.Health/Check": _WATCH,
    "/grpc.health.v1.Health/List": _WATCH,
    "/grpc.health.v1.Health/Watch": _WATCH,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": RequestLimit(4 << 10, 32, 2),
}
"""By a method's full name. A method that is not here has DEFAULT; a test compares the table with the services."""

_SERVICES: tuple[ServiceDescriptor, ...] = (
    coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
    enrollment_pb2.DESCRIPTOR.services_by_name["Enrollment"],
    enrollment_pb2.DESCRIPTOR.services_by_name["Certificates"],
    web_pb2.DESCRIPTOR.services_by_name["WebLogin"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
NESTED: Mapping[str, Nested] = {
    f"/{service.full_name}/{method.name}": nested_of(method.input_type)
    for service in _SERVICES
    for method in service.methods
}
"""By a method's full name: the nested messages of its request."""

LARGEST_ADMIN_BYTES = max(limit.size_bytes for method, limit in LIMITS.items() if "/fl.v1.Admin/" in method)
LARGEST_ENROLLMENT_BYTES = _CERTIFICATE.size_bytes
LARGEST_PROBE_BYTES = max(limit.size_bytes for method, limit in LIMITS.items() if "/grpc.health" in method)


class BadRequest(InvalidInput):
    """A request that is refused before it is parsed. `why`: "size", "values" or "malformed"."""

    def __init__(self, why: str, expected: str, came: str, size_bytes: int = 0) -> None:
        super().__init__("request", expected, came)
        self.why, self.is_large = why, size_bytes > LARGE_BYTES


def parse(method: str, raw: bytes, parser: Callable[[bytes], Any] | None) -> Any:
    """Parse the request of a method. Raises BadRequest for one that is too large or malformed."""
    limit = LIMITS.get(method, DEFAULT)
    name = method.rpartition("/")[2]
    if len(raw) > limit.size_bytes:
        raise BadRequest(
            "size", f"at most {limit.size_bytes} bytes in {name}; send less", f"{len(raw)} bytes", len(raw)
        )
    return parse_counted(name, raw, parser, (NESTED.get(method, {}), limit.values))


def parse_counted(name: str, raw: bytes, parser: Callable[[bytes], Any] | None, allowed: tuple[Nested, int]) -> Any:
    """Parse a message that has no more values than allowed. Raises BadRequest."""
    nested, most = allowed
    try:
        # Every value takes at least one byte, so a short message needs no count.
        if len(raw) > most and count_values(raw, nested, most) > most:
            raise BadRequest("values", f"at most {most} values in {name}; send fewer entries", "more", len(raw))
        return raw if parser is None else parser(raw)
    except (Malformed, DecodeError, RecursionError, UnicodeDecodeError) as error:
        words = str(error) if isinstance(error, Malformed) else "bytes that protobuf cannot parse"
        raise BadRequest("malformed", f"a request as {name} in fl/v1/*.proto has it", words, len(raw)) from error
