"""Messages of an upload, read without copies where they are as clients send them."""

from __future__ import annotations

import pytest

from fl_server.errors import InvalidInput
from fl_server.upload_parts import chunk_of, part_of, request_of
from protos.chunks import ReadChunk, encode_chunk, make_chunk
from protos.fl.v1.coordinator_pb2 import SubmitUpdateRequest

DATA = bytes(range(20))
OTHER_ORDER = b"\x12\x0a\x12\x01x\x1d\x01\x02\x03\x04\x08\x07"
"""The chunk (7, b"x", crc 0x04030201) with its offset behind the rest."""


def test_a_chunk_as_clients_send_it_is_not_copied():
    """Its data is a part of the message."""
    message = encode_chunk(DATA, 4, 10)
    chunk = chunk_of(request_of(message))
    assert chunk.data.obj is message
    assert chunk == (4, DATA[4:14], make_chunk(DATA, 4, 10).crc32c)


def test_a_chunk_in_another_of_protobufs_encodings_is_as_good():
    """Fields may come in any order."""
    request = request_of(OTHER_ORDER)
    assert not isinstance(request, ReadChunk)
    assert chunk_of(request) == (7, b"x", 0x04030201)


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        (None, "nothing"),
        (SubmitUpdateRequest(), "nothing"),
        (SubmitUpdateRequest(trailer={}), "trailer"),
        (request_of(encode_chunk(DATA, 4, 10)), "chunk"),
        (request_of(OTHER_ORDER), "chunk"),
    ],
)
def test_a_part_in_a_word(request_, part):
    """In either form."""
    assert part_of(request_) == part


def test_what_is_no_chunk_is_refused_in_words():
    """With the part that came."""
    with pytest.raises(InvalidInput, match="a chunk or a trailer behind the header, got header"):
        chunk_of(SubmitUpdateRequest(header={}))


def test_what_is_no_message_is_refused_in_words():
    """The call ends with INVALID_ARGUMENT."""
    with pytest.raises(InvalidInput, match="bytes that protobuf cannot parse"):
        request_of(b"\xff\xff")
