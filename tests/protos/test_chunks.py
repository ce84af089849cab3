"""Chunks are checked one by one, and their encoding equals protobuf's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from protos.chunks import (
    ChunkError,
    check_chunk,
    chunk_spans,
    encode_chunk,
    encode_fetch_header,
    encode_piece,
    make_chunk,
    read_chunk,
)
from protos.fl.v1.admin_pb2 import ExportModelResponse
from protos.fl.v1.coordinator_pb2 import FetchModelResponse, SubmitUpdateRequest
from protos.fl.v1.tensor_pb2 import Chunk, Manifest, Resource

DATA = bytes(range(100))

DAMAGE: dict[str, tuple[Callable[[Chunk], object], str]] = {
    "empty": (lambda c: c.ClearField("data"), "expected bytes at offset 40, got an empty chunk"),
    "repeated": (lambda c: setattr(c, "offset", 30), "expected a chunk at offset 40, got offset 30"),
    "ahead": (lambda c: setattr(c, "offset", 50), "got offset 50"),
    "too long": (lambda c: setattr(c, "data", bytes(21)), "at most 20 bytes in a chunk, got 21"),
    "past the end": (lambda c: setattr(c, "data", bytes(16)), "to end at byte 55, got bytes up to 56"),
    "flipped bit": (lambda c: setattr(c, "data", b"\x29" + c.data[1:]), "expected crc32c 0x.* at offset 40, got 0x"),
    "no crc": (lambda c: c.ClearField("crc32c"), "expected crc32c 0x00000000"),
}


def test_the_crc_is_castagnoli() -> None:
    """RFC 3720 B.4: the CRC-32C of 32 zero bytes is aa 36 91 8a, least byte first."""
    assert make_chunk(bytes(32), 0, 32).crc32c == 0x8A9136AA


def test_a_good_chunk_gives_its_data() -> None:
    """A chunk at the expected offset, within the limits and undamaged, gives its data."""
    assert check_chunk(make_chunk(DATA, 40, 10), expected_offset=40, max_bytes=10, total=50) == DATA[40:50]


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_wrong_chunk_is_refused_with_a_message(damage: Callable[[Chunk], object], words: str) -> None:
    """The message names the wrong property."""
    chunk = make_chunk(DATA, 40, 10)
    damage(chunk)
    with pytest.raises(ChunkError, match=words):
        check_chunk(chunk, expected_offset=40, max_bytes=20, total=55)


@given(st.integers(0, 200), st.integers(1, 50), st.data())
def test_spans_cover_the_rest_without_gap_or_overlap(size: int, chunk_bytes: int, data: st.DataObject) -> None:
    """Concatenated they are [start, size), and only the last may be short."""
    start = data.draw(st.integers(0, size))
    spans = list(chunk_spans(size, chunk_bytes, start))
    assert [byte for offset, length in spans for byte in range(offset, offset + length)] == list(range(start, size))
    assert all(length == chunk_bytes for _, length in spans[:-1])


@pytest.mark.parametrize(("chunk_bytes", "start"), [(0, 0), (-1, 0), (1, -1), (1, 11)])
def test_invalid_spans_are_refused(chunk_bytes: int, start: int) -> None:
    """An endless loop and a start behind the end are refused."""
    with pytest.raises(ValueError, match="expected"):
        list(chunk_spans(10, chunk_bytes, start))


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (0, 0), (0, 101), (100, 1)])
def test_a_piece_outside_the_bundle_is_refused(offset: int, length: int) -> None:
    """Slicing would silently give a shorter piece."""
    with pytest.raises(ValueError, match="expected a piece inside 100 bytes"):
        make_chunk(DATA, offset, length)


@pytest.mark.parametrize("message", [FetchModelResponse, SubmitUpdateRequest, ExportModelResponse])
@pytest.mark.parametrize(("offset", "length"), [(0, 1), (1, 127), (200, 128), (70_000, 20_000)])
def test_the_fast_encoding_is_protobufs_own(message: Callable[..., Message], offset: int, length: int) -> None:
    """For lengths of one, two and three varint bytes, at the start (where proto3 leaves out the offset) and later."""
    data = DATA * 1000
    expected = message(chunk=make_chunk(data, offset, length)).SerializeToString()
    assert encode_chunk(data, offset, length) == expected
    assert encode_piece(data[offset : offset + length], offset) == expected


def test_a_known_checksum_is_not_computed_again() -> None:
    """The message has the given checksum."""
    assert FetchModelResponse.FromString(encode_chunk(DATA, 0, 5, 77)).chunk.crc32c == 77


def test_a_fetch_begins_with_a_header() -> None:
    """Parsed, it gives back resource and manifest."""
    resource, manifest = Resource(size_bytes=9), Manifest(size_bytes=9)
    first = FetchModelResponse.FromString(encode_fetch_header(resource, manifest))
    assert (first.header.resource, first.header.manifest) == (resource, manifest)


CHUNKS = st.builds(
    Chunk,
    offset=st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1)),
    data=st.binary(max_size=300),
    crc32c=st.integers(0, 2**32 - 1),
)


@given(st.binary(min_size=1, max_size=300), st.integers(0, 2**40))
def test_a_received_chunk_is_read_without_a_copy(data: bytes, offset: int) -> None:
    """The chunk's data is a view on the message itself, for any offset and length."""
    message = make_message(data, offset)
    chunk = read_chunk(message)
    assert chunk is not None
    assert (chunk.offset, chunk.data, chunk.crc32c) == (offset, data, make_chunk(data, 0, len(data)).crc32c)
    assert isinstance(chunk.data, memoryview)
    assert chunk.data.obj is message


@given(CHUNKS, st.data())
def test_a_chunk_that_is_read_is_what_protobuf_reads(chunk: Chunk, draw: st.DataObject) -> None:
    """For changed, lost, doubled or appended bytes it is the same chunk, or the message is left to protobuf."""
    message = bytearray(SubmitUpdateRequest(chunk=chunk).SerializeToString())
    for _ in range(draw.draw(st.integers(0, 3))):
        at, end = draw.draw(st.integers(0, len(message))), draw.draw(st.integers(0, len(message)))
        message[at:end] = draw.draw(st.binary(max_size=4))
    read = read_chunk(bytes(message))
    if read is not None:
        assert Chunk(offset=read.offset, data=bytes(read.data), crc32c=read.crc32c) == protobufs(bytes(message))


@pytest.mark.parametrize(
    "message",
    [
        SubmitUpdateRequest().SerializeToString(),
        SubmitUpdateRequest(trailer={"size_bytes": 3}).SerializeToString(),
        SubmitUpdateRequest(chunk=Chunk(offset=1)).SerializeToString(),
        encode_chunk(DATA, 40, 10) + b"\x00",
        encode_chunk(DATA, 40, 10) + SubmitUpdateRequest(trailer={"size_bytes": 3}).SerializeToString(),
        encode_chunk(DATA, 40, 10)[:-1],
        b"\x12\x0a\x12\x01x\x1d\x01\x02\x03\x04\x08\x00",
        b"\x12" + b"\xff" * 12,
        b"\x12\x12" + encode_chunk(DATA, 40, 10)[2:],
        b"\x12\x14" + encode_chunk(DATA, 40, 10)[2:],
    ],
    ids=[
        "nothing",
        "trailer",
        "no data",
        "a tag behind",
        "two parts",
        "cut",
        "another order",
        "endless number",
        "short",
        "long",
    ],
)
def test_everything_else_is_left_to_protobuf(message: bytes) -> None:
    """Another part, another order of fields, and invalid messages are left to protobuf."""
    assert read_chunk(message) is None


def make_message(data: bytes, offset: int) -> bytes:
    """The wire bytes of an upload's message that holds these bytes at this offset."""
    chunk = make_chunk(data, 0, len(data))
    chunk.offset = offset
    return SubmitUpdateRequest(chunk=chunk).SerializeToString()


def protobufs(message: bytes) -> Chunk | None:
    """The chunk that protobuf reads; None if it refuses."""
    try:
        return SubmitUpdateRequest.FromString(message).chunk
    except DecodeError:
        return None
