"""Values that both ends of a connection share: protocol versions, sizes, gRPC channel options, times and enum names."""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from protos.fl.v1.training_pb2 import PayloadKind

M = TypeVar("M", bound=Message)

PROTOCOL_MIN = 1
"""Oldest supported protocol version. Clients are not upgraded all at once."""
PROTOCOL_MAX = 1
"""Newest supported protocol version."""

CHUNK_BYTES = 1 << 20
"""Preferred chunk size: larger messages delay the event loop, smaller ones need more calls."""
MAX_CHUNK_BYTES = 4 << 20
"""Largest accepted chunk; at most two of them are in memory for each stream."""
MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + (1 << 20)
"""Largest message: a chunk and its envelope, or the manifest of a model of some 50,000 tensors."""
AHEAD_BYTES = 1 << 20
"""Bytes that one call may send before the receiver reads them. On `listen` it is the setting `transfers.ahead_mib`."""

BROWSER_ADDRESS = "fl-browser-address"
"""Metadata of the web process's calls: host:port of the browser that it calls for."""

KEEPALIVE_SECONDS = 30
"""A connection is pinged after this time without traffic."""
KEEPALIVE_TIMEOUT_SECONDS = 12
"""An unanswered ping ends the connection after this time, so that a dead peer is noticed within 45 s."""
MIN_PING_INTERVAL_SECONDS = 10
"""The shortest ping interval that the server accepts: less than half of the clients', to allow for jitter."""

ChannelOptions = tuple[tuple[str, int], ...]


def _common_options(keepalive_s: float = KEEPALIVE_SECONDS) -> ChannelOptions:
    return (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # The time that gRPC really waits for a ping: one minute without this option, despite the line above.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # Ping between calls too.
        ("grpc.keepalive_permit_without_calls", 1),
        # An Attend stream may be silent for hours: allow any number of pings without data.
        ("grpc.http2.max_pings_without_data", 0),
    )


def client_options(keepalive_s: float = KEEPALIVE_SECONDS) -> ChannelOptions:
    """Arguments of a client's channel. keepalive_s: the silence after which it pings."""
    return (
        *_common_options(keepalive_s),
        # The daemon decides about retries; the transport must not retry by itself.
        ("grpc.enable_retries", 0),
        # By default the backoff grows to two minutes, which is too long after a restart of the coordinator.
        ("grpc.initial_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 15_000),
        # Otherwise channels to one address share a connection, and a stalled client would stall others.
        ("grpc.use_local_subchannel_pool", 1),
        # Only a caller that has chosen a proxy goes through one (fl_common/proxies.py): gRPC would send loopback too.
        ("grpc.enable_http_proxy", 0),
    )


def server_options() -> ChannelOptions:
    """Arguments of a server."""
    return (
        *_common_options(),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_SECONDS * 1000),
        # A second server on the port must fail instead of getting half of the connections.
        ("grpc.so_reuseport", 0),
        # By default gRPC adapts this per connection, from 4 MiB to 1 GiB: a hostile client can raise it.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", AHEAD_BYTES),
    )


_KINDS = {
    "delta": PayloadKind.PAYLOAD_KIND_DELTA,
    "full_gradient": PayloadKind.PAYLOAD_KIND_FULL_GRADIENT,
    "variate_change": PayloadKind.PAYLOAD_KIND_VARIATE_CHANGE,
    "client_momentum": PayloadKind.PAYLOAD_KIND_CLIENT_MOMENTUM,
}
"""Payloads with a kind of their own. All others have the kind NAMED, and their name in the message."""

MAX_PAYLOAD_NAME = 64
"""Characters of a payload's name."""


def payload_kind(payload: str) -> PayloadKind:
    """The wire's kind of a payload: that of "delta" and a few others, or NAMED."""
    return _KINDS.get(payload, PayloadKind.PAYLOAD_KIND_NAMED)


def payload_name(payload: str) -> str:
    """The name that the wire needs in addition to the kind. Empty unless the kind is NAMED."""
    return "" if payload in _KINDS else payload


def check_payload_name(name: str) -> str:
    """The name of a payload. Raises ValueError for one that the wire cannot have."""
    if not re.fullmatch(rf"[A-Za-z0-9_.-]{{1,{MAX_PAYLOAD_NAME}}}", name) or name == "buffers":
        raise ValueError(
            f'expected the name of a payload, 1 to {MAX_PAYLOAD_NAME} of a-z A-Z 0-9 _ . - and not "buffers", got '
            f"{name[: 2 * MAX_PAYLOAD_NAME]!r}"
        )
    return name


def known_name(enum: EnumTypeWrapper, number: int) -> str:
    """An enum value's name. An unknown number, as from a newer peer, counts as the unspecified value 0."""
    names = {value: name for name, value in enum.items()}
    return names.get(number, names[0])


def numbers(message: Message) -> dict[str, int | float]:
    """The plain numbers of a message by name: without lists, messages, enums, texts, and fields of a oneof."""
    plain = [
        field.name for field in message.DESCRIPTOR.fields if field.containing_oneof is None and not field.enum_type
    ]
    values = {name: getattr(message, name) for name in plain}
    return {name: value for name, value in values.items() if type(value) in {int, float}}


def filled(kind: type[M], record: Any, **others: Any) -> M:
    """A message with the record's values of the fields that both have under one name, and with others."""
    names = _shared_names(kind.DESCRIPTOR, cast(Hashable, type(record)))  # mypy takes a type for unhashable
    values = {name: getattr(record, name) for name in names if name not in others}
    return kind(**values, **others)


@cache
def _shared_names(message: Descriptor, record: Hashable) -> list[str]:
    names: set[str] = {*dir(record), *getattr(record, "__dataclass_fields__", ())}
    return [field.name for field in message.fields if field.name in names]


def timestamp(seconds: float) -> Timestamp:
    """Unix seconds as a Timestamp."""
    message = Timestamp()
    message.FromNanoseconds(int(seconds * 1e9))
    return message
