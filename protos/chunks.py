"""Chunks: the pieces of a bundle that fit into messages, each with its own checksum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import google_crc32c

from protos.fl.v1 import coordinator_pb2, tensor_pb2

Buffer = bytes | bytearray | memoryview

# Field number and wire type: `uint64 offset = 1`, `bytes data = 2` and `fixed32 crc32c = 3` of Chunk, and
# `Chunk chunk = 2` of the messages that carry one. tests/protos/test_chunks.py compares them with the descriptors.
_CHUNK_OFFSET_TAG = b"\x08"
_CHUNK_DATA_TAG = b"\x12"
_CHUNK_CRC_TAG = b"\x1d"
_STREAM_CHUNK_TAG = b"\x12"
_CRC_BYTES = 5
"""Bytes of the checksum and its tag."""
_VARINT_BYTES = 9
"""Longest encoding of a number below 2**63; protobuf reads longer ones."""


class ChunkError(ValueError):
    """A chunk is damaged or is not the expected one."""


class AnyChunk(Protocol):
    """A received chunk: protobuf's Chunk, or a ReadChunk."""

    @property
    def offset(self) -> int:
        """Bytes from the start of the bundle."""
        ...

    @property
    def data(self) -> Buffer:
        """The bytes; protobuf copies them at every access."""
        ...

    @property
    def crc32c(self) -> int:
        """The sender's checksum of the data."""
        ...


class ReadChunk(NamedTuple):
    """A chunk whose data is a view of the received message, which it keeps alive."""

    offset: int
    data: Buffer
    crc32c: int


def read_chunk(message: bytes) -> ReadChunk | None:
    """The chunk in the wire bytes of a stream message, without a copy, if they are encoded as by `encode_chunk`.

    None for everything else: another part, or a chunk in another valid encoding. protobuf reads or refuses these. What
    is read here has the same meaning for protobuf.
    """
    if message[:1] != _STREAM_CHUNK_TAG:
        return None
    size, at = _read_varint(message, 1)
    if size != len(message) - at:
        return None
    offset = 0
    if message[at : at + 1] == _CHUNK_OFFSET_TAG:
        offset, at = _read_varint(message, at + 1)
    if offset < 0 or message[at : at + 1] != _CHUNK_DATA_TAG:
        return None
    length, start = _read_varint(message, at + 1)
    end = start + length
    if length < 0 or end + _CRC_BYTES != len(message) or message[end : end + 1] != _CHUNK_CRC_TAG:
        return None
    return ReadChunk(offset, memoryview(message)[start:end], int.from_bytes(message[end + 1 :], "little"))


def is_chunk(message: bytes) -> bool:
    """Whether the wire bytes of a stream message are exactly one Chunk, so that parsing needs about their length."""
    size, at = _read_varint(message, 1)
    return message[:1] == _STREAM_CHUNK_TAG and size == len(message) - at


def crc32c(buffer: Buffer) -> int:
    """CRC-32C (Castagnoli) of the bytes, without a copy: the checksum of chunks on the wire and on disk."""
    # google_crc32c does not accept a memoryview, but an array over the same memory.
    import numpy as np  # noqa: PLC0415 - takes longer to import than the rest of `fl --help`, which needs no chunks

    return int(google_crc32c.value(np.frombuffer(buffer, np.uint8)))


def make_chunk(buffer: Buffer, offset: int, length: int) -> tensor_pb2.Chunk:
    """The piece of a bundle at [offset, offset + length), with its CRC-32C."""
    data = bytes(_span(buffer, offset, length))
    return tensor_pb2.Chunk(offset=offset, data=data, crc32c=crc32c(data))


def check_chunk(chunk: AnyChunk, expected_offset: int, max_bytes: int, total: int) -> Buffer:
    """The chunk's data, if it is the next expected chunk.

    Args:
        chunk: as received.
        expected_offset: bytes of the bundle received so far.
        max_bytes: the largest accepted chunk.
        total: bytes of the whole bundle.

    Raises:
        ChunkError: the chunk is empty, at another offset, too long, beyond the end, or damaged.
    """
    data = chunk.data
    if not data:
        raise ChunkError(f"expected bytes at offset {expected_offset}, got an empty chunk")
    if chunk.offset != expected_offset:
        raise ChunkError(f"expected a chunk at offset {expected_offset}, got offset {chunk.offset}")
    if len(data) > max_bytes:
        raise ChunkError(f"expected at most {max_bytes} bytes in a chunk, got {len(data)}")
    if chunk.offset + len(data) > total:
        raise ChunkError(f"expected the bundle to end at byte {total}, got bytes up to {chunk.offset + len(data)}")
    if (crc := crc32c(data)) != chunk.crc32c:
        raise ChunkError(
            f"expected crc32c {chunk.crc32c:#010x} at offset {chunk.offset}, got {crc:#010x}: send it again"
        )
    return data


def chunk_spans(size: int, chunk_bytes: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """(offset, length) of the chunks that cover [start, size); nothing when start is size."""
    if chunk_bytes < 1:
        raise ValueError(f"expected at least 1 byte in a chunk, got {chunk_bytes}")
    if not 0 <= start <= size:
        raise ValueError(f"expected a start from 0 to {size}, got {start}")
    for offset in range(start, size, chunk_bytes):
        yield offset, min(chunk_bytes, size - offset)


def encode_chunk(buffer: Buffer, offset: int, length: int, checksum: int | None = None) -> bytes:
    """Wire bytes of a stream message with this chunk.

    They are the same for FetchModelResponse, SubmitUpdateRequest and ExportModelResponse, which all have
    `Chunk chunk = 2`. protobuf would write the same bytes, but copy the data three times instead of once.

    checksum: the CRC-32C of these bytes, if known.
    """
    return encode_piece(_span(buffer, offset, length), offset, checksum)


def encode_piece(data: Buffer, offset: int, checksum: int | None = None) -> bytes:
    """The result of `encode_chunk` for data that starts at the offset."""
    length = len(data)
    before = tensor_pb2.Chunk(offset=offset).SerializeToString() + _CHUNK_DATA_TAG + _varint(length)
    after = tensor_pb2.Chunk(crc32c=crc32c(data) if checksum is None else checksum).SerializeToString()
    size = _varint(len(before) + length + len(after))
    return b"".join((_STREAM_CHUNK_TAG, size, before, data, after))


def encode_fetch_header(resource: tensor_pb2.Resource, manifest: tensor_pb2.Manifest) -> bytes:
    """Wire bytes of the FetchModelResponse before a bundle's chunks."""
    header = coordinator_pb2.ResourceHeader(resource=resource, manifest=manifest)
    return coordinator_pb2.FetchModelResponse(header=header).SerializeToString()


def _span(buffer: Buffer, offset: int, length: int) -> memoryview:
    """The bytes at [offset, offset + length), without a copy. Raises ValueError if they are not inside the buffer."""
    view = memoryview(buffer).cast("B")
    if offset < 0 or length < 1 or offset + length > len(view):
        raise ValueError(f"expected a piece inside {len(view)} bytes, got {length} bytes at offset {offset}")
    return view[offset : offset + length]


def _varint(value: int) -> bytes:
    """A length as protobuf's varint: seven bits per byte, low bits first, the high bit set on all but the last."""
    groups = bytearray()
    while value >> 7:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """The varint at a position, and the position after it; -1 if it is truncated or too long."""
    value = 0
    for place, byte in enumerate(message[at : at + _VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    return -1, at
