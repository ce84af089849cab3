"""Parses requests: size and values are checked on the bytes, before protobuf builds an object for each value.

An empty sub-message takes two bytes on the wire and fifty to two hundred in memory. The count stops at the limit, so it
never costs more than the largest allowed request. A chunk of SubmitUpdate is parsed without the copies that protobuf
makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, Union

from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from fl_server.errors import InvalidInput
from fl_server.rpc.methods import METHODS, RequestLimit
from fl_server.uploads.stream import Request
from protos.chunks import read_chunk
from protos.fl.v1 import admin_pb2, coordinator_pb2, enrollment_pb2, web_pb2, worker_pb2
from protos.fl.v1 import coordinator_pb2 as pb

LARGE_BYTES = 256 << 10
"""No honest client sends a refused request above this size."""
MOST_VALUES = 1 << 15
"""Values in a header: enough for manifests of about 4,000 tensors. A model with more tensors raises the limit."""
VALUES_A_TENSOR = 48
"""Values of a tensor in up to three payloads: name, dtype, up to eight sizes, offset and similar fields of each."""
MOST_NESTED = 64
"""Deepest nesting of messages, with map entries: twenty levels of a Struct."""
_FIXED = {1: 8, 5: 4}
"""Bytes of a value by its wire type."""
_WIDTHS = {
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), 8),
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), 4),
}
_TEXTS = frozenset({FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES})
_LONGEST_VARINT = 10

Nested: TypeAlias = Mapping[int, Union["Nested", int]]
"""The fields of a sub-message by field number, or the fewest bytes of a value of a packed field. Texts and single
numbers are left out: each is one value."""
_SERVICES: tuple[ServiceDescriptor, ...] = (
    coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"],
    worker_pb2.DESCRIPTOR.services_by_name["Workers"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
    enrollment_pb2.DESCRIPTOR.services_by_name["Enrollment"],
    enrollment_pb2.DESCRIPTOR.services_by_name["Certificates"],
    web_pb2.DESCRIPTOR.services_by_name["WebLogin"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)


class Malformed(ValueError):
    """Bytes that are no valid message: truncated, or nested too deeply. The text has the reason."""


def nested_of(kind: Descriptor) -> Nested:
    """The nested fields of a message type, at any depth."""
    return _nested(kind, {})


def _nested(kind: Descriptor, known: dict[str, dict[int, Nested | int]]) -> dict[int, Nested | int]:
    if kind.full_name in known:
        return known[kind.full_name]
    nested: dict[int, Nested | int] = {}
    known[kind.full_name] = nested
    for field in kind.fields:
        if field.message_type is not None:
            nested[field.number] = _nested(field.message_type, known)
        elif field.is_repeated and field.type not in _TEXTS:
            nested[field.number] = _WIDTHS.get(field.type, 1)
    return nested


def count_values(message: bytes, nested: Nested, most: int) -> int:
    """Values in a message, at any depth: fields, sub-messages, elements of packed fields.

    Args:
        message: the serialized message.
        nested: `nested_of` its type.
        most: the count stops at the first value above this.

    Raises:
        Malformed: it is truncated, has groups, or is nested more than MOST_NESTED deep.
    """
    count = at = 0
    end, fields = len(message), nested
    outside: list[tuple[int, Nested]] = []
    while count <= most:
        if at >= end:
            if not outside:
                break
            end, fields = outside.pop()
            continue
        count += 1
        # Nearly every key and size is one byte: a function call for each would double the cost.
        key = message[at]
        at += 1
        if key >= 0x80:
            key, at = _varint(message, at - 1, end)
        wire = key & 7
        if wire == 0:
            at = _varint(message, at, end)[1]
            continue
        if wire != 2:
            at = _within(at + _width(wire, at), end)
            continue
        size, at = _varint(message, at, end)
        inner, behind = fields.get(key >> 3), _within(at + size, end)
        if isinstance(inner, int):
            count += size // inner
        elif inner is not None and size:
            if len(outside) >= MOST_NESTED:
                raise Malformed(f"it is nested more than {MOST_NESTED} deep")
            outside.append((end, fields))
            end, fields = behind, inner
            continue
        at = behind
    return count


def _varint(message: bytes, at: int, end: int) -> tuple[int, int]:
    if at < end and message[at] < 0x80:
        return message[at], at + 1
    value = shift = 0
    for place in range(at, min(end, at + _LONGEST_VARINT)):
        byte = message[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise Malformed(f"it is truncated at byte {at}")


def _within(at: int, end: int) -> int:
    if at > end:
        raise Malformed(f"it ends at byte {end}, inside a field")
    return at


def _width(wire: int, at: int) -> int:
    if (width := _FIXED.get(wire)) is None:
        raise Malformed(f"it has a field of wire type {wire} at byte {at - 1}")
    return width


NESTED: Mapping[str, Nested] = {
    f"/{service.full_name}/{method.name}": nested_of(method.input_type)
    for service in _SERVICES
    for method in service.methods
}
"""The nested messages of each method's request, by its full name."""


class BadRequest(InvalidInput):
    """A request that is refused before it is parsed. `why`: "size", "values" or "malformed"."""

    def __init__(self, why: str, expected: str, came: str, size_bytes: int = 0) -> None:
        super().__init__("request", expected, came)
        self.why, self.is_large = why, size_bytes > LARGE_BYTES


def parse(method: str, raw: bytes, parser: Callable[[bytes], Any] | None) -> Any:
    """Parse the request of a method. Raises BadRequest for one that is too large or malformed."""
    limit = METHODS[method].limit if method in METHODS else RequestLimit()
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


def parse_request(message: bytes, most_values: Callable[[], int] = lambda: MOST_VALUES) -> Request:
    """A message from its wire bytes. Raises InvalidInput for bytes that are not a message.

    most_values: the limit of fields, tensors and sizes in a message that is not a chunk.
    """
    if (chunk := read_chunk(message)) is not None:
        return chunk
    allowed = NESTED["/fl.v1.Coordinator/SubmitUpdate"], most_values()
    request: Request = parse_counted("SubmitUpdate", message, pb.SubmitUpdateRequest.FromString, allowed)
    return request
