"""The messages of an upload: header, chunks, trailer. A chunk is read where it lies, without protobuf's copies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from fl_server.errors import InvalidInput
from fl_server.rpc.requests import NESTED, parse_counted
from protos.chunks import ReadChunk, read_chunk
from protos.fl.v1 import coordinator_pb2 as pb

Request = pb.SubmitUpdateRequest | ReadChunk
"""A message; a chunk may come in either form, for another encoding of it is as good."""
Requests = AsyncIterator[Request]


_NESTED = NESTED["/fl.v1.Coordinator/SubmitUpdate"]
MOST_VALUES = 1 << 15
"""In a header: tables of contents of some 4,000 tensors. Where a model has more, so has the limit."""
VALUES_A_TENSOR = 48
"""Of up to three payloads: name, dtype, up to eight sizes, offset and the like of each."""


def request_of(message: bytes, most_values: Callable[[], int] = lambda: MOST_VALUES) -> Request:
    """A message from its wire bytes. Raises InvalidInput for what is none.

    most_values: how many fields, tensors and sizes a message may have that is not a chunk.
    """
    if (chunk := read_chunk(message)) is not None:
        return chunk
    allowed = _NESTED, most_values()
    request: Request = parse_counted("SubmitUpdate", message, pb.SubmitUpdateRequest.FromString, allowed)
    return request


def part_of(request: Request | None) -> str:
    """Which part it is, in a word."""
    if request is None:
        return "nothing"
    return "chunk" if isinstance(request, ReadChunk) else request.WhichOneof("part") or "nothing"


def chunk_of(request: Request) -> ReadChunk:
    """The chunk in a message, its data looked at once. Raises InvalidInput for another part."""
    if isinstance(request, ReadChunk):
        return request
    if (part := part_of(request)) != "chunk":
        raise InvalidInput("part", "a chunk or a trailer behind the header", part)
    return ReadChunk(request.chunk.offset, request.chunk.data, request.chunk.crc32c)


_FREE_CHUNKS = 4096
_LEAST_CHUNK_BYTES = 4096


class Chunks:
    """The chunks of one stream, so many at most: each costs a write and a note on the disk, however small it is."""

    def __init__(self, size_bytes: int) -> None:
        self._most = self._left = _FREE_CHUNKS + size_bytes // _LEAST_CHUNK_BYTES

    def next(self, request: Request) -> ReadChunk:
        """As `chunk_of`. Raises InvalidInput for one too many."""
        if not self._left:
            raise InvalidInput("chunk", f"{self._most} chunks of an upload at most: send larger ones", "one more")
        self._left -= 1
        return chunk_of(request)
