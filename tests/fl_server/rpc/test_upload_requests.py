"""Messages of an upload, read without copies if they have the clients' encoding."""

from __future__ import annotations

import pytest

from fl_server.errors import InvalidInput
from fl_server.rpc.call_limits import parse_request
from fl_server.uploads.stream import chunk_of, part_of
from protos.chunks import ReadChunk, encode_chunk, make_chunk
from protos.fl.v1.coordinator_pb2 import SubmitUpdateRequest

DATA = bytes(range(20))
OTHER_ORDER = b"\x12\x0a\x12\x01x\x1d\x01\x02\x03\x04\x08\x07"
"""The chunk (7, b"x", crc 0x04030201) with its offset as the last field."""


def test_a_chunk_in_the_clients_encoding_is_not_copied() -> None:
    """Its data is a view of the message."""
    message = encode_chunk(DATA, 4, 10)
    chunk = chunk_of(parse_request(message))
    assert isinstance(chunk.data, memoryview)
    assert chunk.data.obj is message
    assert chunk == (4, DATA[4:14], make_chunk(DATA, 4, 10).crc32c)


def test_a_chunk_in_another_encoding_is_accepted() -> None:
    """Protobuf allows fields in any order."""
    request = parse_request(OTHER_ORDER)
    assert not isinstance(request, ReadChunk)
    assert chunk_of(request) == (7, b"x", 0x04030201)


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        (None, "nothing"),
        (SubmitUpdateRequest(), "nothing"),
        (SubmitUpdateRequest(trailer={}), "trailer"),
        (parse_request(encode_chunk(DATA, 4, 10)), "chunk"),
        (parse_request(OTHER_ORDER), "chunk"),
    ],
)
def test_the_part_of_a_request_has_a_name(request_: SubmitUpdateRequest | ReadChunk | None, part: str) -> None:
    """For a parsed message and for a chunk that was read without a copy."""
    assert part_of(request_) == part


def test_a_request_without_a_chunk_is_refused() -> None:
    """The error names the part that was sent."""
    with pytest.raises(InvalidInput, match="a chunk or a trailer behind the header, got header"):
        chunk_of(SubmitUpdateRequest(header={}))


def test_an_invalid_message_is_refused() -> None:
    """The call ends with INVALID_ARGUMENT."""
    with pytest.raises(InvalidInput, match="bytes that protobuf cannot parse"):
        parse_request(b"\xff\xff")
