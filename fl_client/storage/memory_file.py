"""File format of client states: metadata and named tensors, protected by a digest.

digest          BLAKE3-256 of all that follows
lengths         of metadata and manifest, eight bytes each
metadata        bytes of the writer
manifest        of one bundle; a tensor's name is "number of the memory / symbol / name"
data            the bundle
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from io import BufferedReader

from google.protobuf.message import DecodeError

from algorithms.base import Memory, Tensors
from protos.chunks import Buffer
from protos.codec import Layout, LayoutError, digest_of, pieces_of, unpack
from protos.fl.v1 import tensor_pb2

_DIGEST_BYTES = 32
_LENGTHS = struct.Struct("<QQ")


class Damaged(ValueError):
    """Bytes that `encode` did not write: truncated, changed, or of another program."""


def encode(metadata: bytes, memories: Sequence[Memory]) -> list[Buffer]:
    """The bytes of memories, in pieces that may share the tensors' memory. Tensors may be on any device."""
    tensors = {
        f"{number}/{symbol}/{name}": tensor
        for number, memory in enumerate(memories)
        for symbol, named in memory.items()
        for name, tensor in named.items()
    }
    layout = Layout.of(tensors)
    manifest = layout.to_manifest().SerializeToString()
    pieces: list[Buffer] = [
        _LENGTHS.pack(len(metadata), len(manifest)),
        metadata,
        manifest,
        *pieces_of(tensors, layout),
    ]
    return [digest_of(*pieces), *pieces]


def read_metadata(file: BufferedReader) -> bytes:
    """The metadata alone, from the file's position, without a check of the digest. Raises Damaged."""
    return _head(file)[2]


def decode(file: BufferedReader, count: int) -> tuple[bytes, list[Memory]]:
    """Metadata and `count` memories, from the file's position to its end. Tensors are on the CPU.

    Raises:
        Damaged: `encode` did not write these bytes.
    """
    digest, lengths, metadata, manifest_bytes = _head(file)
    manifest = _exactly(file, manifest_bytes)
    data = _exactly(file, _left(file))
    if digest_of(lengths, metadata, manifest, data) != digest:
        raise Damaged(f"expected bytes of digest {digest.hex()[:16]}, got others")
    try:
        layout = Layout.from_manifest(tensor_pb2.Manifest.FromString(bytes(manifest)), len(data))
        return metadata, _memories(unpack(data, layout), count)
    except (DecodeError, LayoutError, ValueError, IndexError) as error:
        raise Damaged(f"expected client states, got {error}") from error


def _memories(tensors: Tensors, count: int) -> list[Memory]:
    memories: list[dict[str, Tensors]] = [{} for _ in range(count)]
    for place, tensor in tensors.items():
        number, symbol, name = place.split("/", 2)
        memories[int(number)].setdefault(symbol, {})[name] = tensor
    return list(memories)


def _head(file: BufferedReader) -> tuple[bytes, bytes, bytes, int]:
    """Digest, lengths, metadata, and the size of the manifest that follows."""
    digest = bytes(_exactly(file, _DIGEST_BYTES))
    lengths = bytes(_exactly(file, _LENGTHS.size))
    metadata_bytes, manifest_bytes = _LENGTHS.unpack(lengths)
    return digest, lengths, bytes(_exactly(file, metadata_bytes)), manifest_bytes


def _exactly(file: BufferedReader, size: int) -> bytearray:
    """The next `size` bytes. No memory is taken for bytes that the file does not have."""
    if size > (left := _left(file)):
        raise Damaged(f"expected {size} bytes more, got {left}")
    data = bytearray(size)
    file.readinto(data)
    return data


def _left(file: BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size - file.tell()
