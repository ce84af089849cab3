"""Limits of calls: how many a caller may have open at once and for how long, and how large a request may be.

A caller is the holder of a certificate; without certificates it is a connection. One caller cannot use up what others
need. The transport checks a certificate only in the handshake, and a stream may be open for months: an open call ends
soon after its caller's certificate or token has expired, and at once when it is revoked. Expiry is a time of the wall
clock, which may be set, so the clock is read periodically instead of being waited for once.

Size and values of a request are checked on the bytes, before protobuf builds an object for each value. An empty
sub-message takes two bytes on the wire and fifty to two hundred in memory. The count stops at the limit, so it never
costs more than the largest allowed request. A chunk of SubmitUpdate is parsed without the copies that protobuf makes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypeAlias, Union

from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from fl_common.units import counted
from fl_server.enrollment.grants import Revocations
from fl_server.errors import InvalidInput, Revoked, ServerError, TooMany
from fl_server.identity import Identity
from fl_server.rpc.methods import METHODS, RequestLimit
from fl_server.uploads.stream import Request
from protos.chunks import read_chunk
from protos.fl.v1 import admin_pb2, coordinator_pb2, enrollment_pb2, web_pb2, worker_pb2
from protos.fl.v1 import coordinator_pb2 as pb

RETRY_S = 1.0
BLOCK_S = 10.0
"""A caller whose large request was refused is blocked for this long. The transport receives a message up to its own
limit before the method's limit can be checked; a caller that repeats such requests would use up memory."""
MOST_BLOCKED = 4096
"""Blocked callers that are remembered."""
CHECK_S = 1.0
"""Period of the checks, while such a call is open."""
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


class OpenCall:
    """One open call, which is closed once."""

    def __init__(self, limits: CallLimits, who: str, method: str) -> None:
        self._limits, self._who, self._method = limits, who, method
        self._closed = False

    @contextmanager
    def refusals_block(self) -> Iterator[None]:
        """A large request that is refused in this block blocks the caller for a while."""
        try:
            yield
        except BadRequest as error:
            if error.is_large:
                self._limits.block(self._who)
            raise

    def close(self) -> None:
        """Close the call. Further calls of this method do nothing."""
        if not self._closed:
            self._closed = True
            self._limits.closed(self._who, self._method)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CallLimits:
    """Counts the open calls of one server. Lives on the event loop."""

    def __init__(self, per_caller: int, in_all: int, known_connections: int = 1024) -> None:
        """known_connections: connections that are remembered, to count each once."""
        self._per_caller, self._in_all = per_caller, in_all
        self._open: dict[str, Counter[str]] = {}
        """Numbers of open calls by caller, then by method."""
        self._blocked: OrderedDict[str, float] = OrderedDict()
        """The end of the block of each caller."""
        self._count = 0
        self._most_known = known_connections
        self._connections: OrderedDict[str, None] = OrderedDict()

    def open(self, who: str, method: str, at_once: int) -> OpenCall:
        """Open a call of a method of which a caller may have `at_once` open. Raises TooMany."""
        name, own = method.rpartition("/")[2], self._open.get(who)
        if self._blocked and (blocked_s := self._blocked.get(who, 0.0) - time.monotonic()) > 0:
            raise TooMany("the caller's last large request was refused", math.ceil(blocked_s), routine=True)
        if own is not None and own[method] >= at_once:
            raise TooMany(f"one caller may have at most {at_once} calls of {name} open", RETRY_S, routine=True)
        if own is not None and own.total() >= self._per_caller:
            raise TooMany(f"one caller may have at most {self._per_caller} calls open", RETRY_S, routine=True)
        if self._count >= self._in_all:
            raise TooMany(f"{self._in_all} calls are open, which is the limit of this port", RETRY_S, routine=True)
        self._count += 1
        self._open.setdefault(who, Counter())[method] += 1
        return OpenCall(self, who, method)

    def closed(self, who: str, method: str) -> None:
        """A call was closed; a caller without an open call is dropped."""
        calls = self._open[who]
        self._count -= 1
        calls[method] -= 1
        if not calls[method]:
            del calls[method]
        if not calls:
            del self._open[who]

    def block(self, who: str) -> None:
        """Block a caller for a while."""
        self._blocked[who] = time.monotonic() + BLOCK_S
        self._blocked.move_to_end(who)
        if len(self._blocked) > MOST_BLOCKED:
            self._blocked.popitem(last=False)

    def is_new(self, connection: str) -> bool:
        """Whether this is a connection's first call."""
        if connection in self._connections:
            return False
        self._connections[connection] = None
        if len(self._connections) > self._most_known:
            self._connections.popitem(last=False)
        return True


class ExpiringCalls:
    """The open calls of one server, by the end of their callers' certificates. Lives on the event loop."""

    def __init__(self) -> None:
        self._by_end: dict[float, dict[asyncio.Task[object], Identity]] = {}
        self._ended: dict[asyncio.Task[object], ServerError] = {}
        """Tasks that were cancelled here, and why."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._by_end.values()))

    @contextmanager
    def while_valid(self, who: Identity) -> Iterator[None]:
        """Register the current task's call as long as the block.

        Raises CertificateEnded when the certificate ends, Revoked when it is revoked.
        """
        task = asyncio.current_task()
        if who.ends is None or task is None:
            yield
            return
        self._by_end.setdefault(who.ends, {})[task] = who
        self._check_later()
        try:
            yield
        except asyncio.CancelledError:
            if (why := self._ended.get(task)) is None:
                raise
            task.uncancel()
            raise why from None
        finally:
            self._ended.pop(task, None)
            self._forget(who.ends, task)

    def end_denied(self, revocations: Revocations) -> int:
        """End the calls of callers whose certificates are revoked. Returns their number."""
        calls = [(task, who) for same_end in self._by_end.values() for task, who in same_end.items()]
        denied_calls = [(task, Revoked(str(who), why)) for task, who in calls if (why := revocations.denied(who))]
        for task, revoked in denied_calls:
            self._end(task, revoked)
        return len(denied_calls)

    def _forget(self, ends: float, task: asyncio.Task[object]) -> None:
        if (calls := self._by_end.get(ends)) is not None:
            calls.pop(task, None)
            if not calls:
                del self._by_end[ends]

    def _check_later(self) -> None:
        if self._timer is None and self._by_end:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)

    def _check(self) -> None:
        self._timer, now = None, time.time()
        for ends in [end for end in self._by_end if end <= now]:
            for task, who in self._by_end.pop(ends).items():
                self._end(task, who.ended())
        self._check_later()

    def _end(self, task: asyncio.Task[object], why: ServerError) -> None:
        if task not in self._ended:
            self._ended[task] = why
            task.cancel()


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
            raise BadRequest(
                "values", f"at most {counted(most, 'value')} in {name}; send fewer entries", "more", len(raw)
            )
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
