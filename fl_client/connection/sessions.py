"""From a coordinator's answer to a session that work can go through."""

from __future__ import annotations

from fl_client.link import Session
from fl_client.transport import Connection
from protos.fl.v1 import coordinator_pb2 as pb
from protos.wire import CHUNK_BYTES, MAX_CHUNK_BYTES

SMALLEST_CHUNK_BYTES = 16 << 10
"""A limit on chunks that is lower is not kept to: a model would come in millions of them."""


def session_of(response: pb.RegisterResponse, connection: Connection) -> Session:
    """The session with the sizes that both sides keep to; a coordinator that names none gets our own."""
    largest = max(min(response.limits.max_chunk_bytes or MAX_CHUNK_BYTES, MAX_CHUNK_BYTES), SMALLEST_CHUNK_BYTES)
    best = min(response.limits.chunk_bytes or CHUNK_BYTES, largest)
    return Session(response.session_id, connection, best, largest)
