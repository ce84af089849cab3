"""What both ends of a connection must agree on: versions, sizes, keepalive and the shape of names."""

from __future__ import annotations

import re
from typing import cast

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from protos.fl.v1.training_pb2 import PayloadKind

PROTOCOL_MIN = 1
"""Oldest protocol version spoken here: a fleet is never upgraded at once."""
PROTOCOL_MAX = 1
"""Newest protocol version spoken here."""

CHUNK_BYTES = 1 << 20
"""Best chunk size: larger messages hold up an event loop, smaller ones cost calls."""
MAX_CHUNK_BYTES = 4 << 20
"""Largest chunk that is taken; at most two of them are in memory for each stream."""
MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + (1 << 20)
"""Largest message: a chunk and its envelope, or the manifest of a model of some 50,000 tensors."""

KEEPALIVE_SECONDS = 30
"""A connection that was silent for so long is pinged."""
KEEPALIVE_TIMEOUT_SECONDS = 12
"""A ping unanswered for so long ends the connection: a dead peer is noticed within 45 s with room to spare."""
MIN_PING_INTERVAL_SECONDS = 10
"""The server takes pings this often: under half of the clients' interval, so that jitter never looks like abuse."""

ChannelOptions = tuple[tuple[str, int], ...]


def _common_options() -> ChannelOptions:
    return (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # What an unanswered ping is really waited for: a minute without this, whatever the line above says.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # A daemon between two calls is still watched.
        ("grpc.keepalive_permit_without_calls", 1),
        # An Attend stream may carry nothing for hours: pings need no data in between.
        ("grpc.http2.max_pings_without_data", 0),
    )


def client_options() -> ChannelOptions:
    """Arguments of a client's channel."""
    return (
        *_common_options(),
        # Whether and when a call is made again is the daemon's decision; the transport must not repeat it unseen.
        ("grpc.enable_retries", 0),
        # The transport's own backoff goes up to two minutes: longer than a restart should keep a fleet away.
        ("grpc.initial_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 15_000),
        # Channels to one address share a connection otherwise, and one client's stall would be another's.
        ("grpc.use_local_subchannel_pool", 1),
    )


def server_options() -> ChannelOptions:
    """Arguments of a server."""
    return (
        *_common_options(),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_SECONDS * 1000),
        # A second server on the port must fail instead of taking half of the connections.
        ("grpc.so_reuseport", 0),
        # What an upload may send ahead. By itself the transport measures each connection and lets many megabytes wait.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 1 << 20),
    )


ID_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
"""Ids of clients and runs: file names as they are. No leading dot or dash, so never ".." and never an option."""


def check_id(kind: str, value: str) -> str:
    """`value`, if it is fit for an id.

    Args:
        kind: what it names, for the message: "client id", "run id".
        value: as it came.

    Raises:
        ValueError: it is not 1 to 64 letters, digits, dots, dashes and underscores, or starts with a dot or a dash.
    """
    if ID_PATTERN.fullmatch(value) is None:
        raise ValueError(
            f"{kind}: expected 1 to 64 of A-Z a-z 0-9 . _ - that do not start with . or -, got {value[:80]!r}"
        )
    return value


def payload_kind(payload: str) -> PayloadKind:
    """The wire's name for a payload of a method, such as "delta". Raises ValueError when it has none."""
    return cast(PayloadKind, PayloadKind.Value(f"PAYLOAD_KIND_{payload.upper()}"))


def known_name(enum: EnumTypeWrapper, number: int) -> str:
    """An enum value's name. A number that only a newer peer knows is taken as the unspecified value, 0."""
    names = {value: name for name, value in enum.items()}
    return names.get(number, names[0])
