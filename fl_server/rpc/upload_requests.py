"""Parses the messages of SubmitUpdate. A chunk is parsed without the copies that protobuf makes."""

from __future__ import annotations

from collections.abc import Callable

from fl_server.rpc.limits.requests import NESTED, parse_counted
from fl_server.uploads.chunk_stream import Request
from protos.chunks import read_chunk
from protos.fl.v1 import coordinator_pb2 as pb

MOST_VALUES = 1 << 15
"""Values in a header: enough for manifests of about 4,000 tensors. A model with more tensors raises the limit."""
VALUES_A_TENSOR = 48
"""In up to three payloads: name, dtype, up to eight sizes, offset and similar fields of each."""
_NESTED = NESTED["/fl.v1.Coordinator/SubmitUpdate"]


def parse_request(message: bytes, most_values: Callable[[], int] = lambda: MOST_VALUES) -> Request:
    """A message from its wire bytes. Raises InvalidInput for bytes that are not a message.

    most_values: the limit of fields, tensors and sizes in a message that is not a chunk.
    """
    if (chunk := read_chunk(message)) is not None:
        return chunk
    allowed = _NESTED, most_values()
    request: Request = parse_counted("SubmitUpdate", message, pb.SubmitUpdateRequest.FromString, allowed)
    return request
