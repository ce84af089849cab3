"""Client states in bytes: facts about them and their named tensors, whole by their digest or not at all.

digest          BLAKE3-256 of all that follows
lengths         of facts and manifest, eight bytes each
facts           whatever the writer wants to find again
manifest        of one bundle; a tensor's name is "which memory / symbol / name"
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
    """Bytes that nobody wrote here like this: torn, changed, or another program's."""


def encode(facts: bytes, memories: Sequence[Memory]) -> list[Buffer]:
    """The bytes of memories, in pieces that may share the tensors' memory. Tensors may be on any device."""
    tensors = {
        f"{number}/{symbol}/{name}": tensor
        for number, memory in enumerate(memories)
        for symbol, named in memory.items()
        for name, tensor in named.items()
    }
    layout = Layout.of(tensors)
    manifest = layout.to_manifest().SerializeToString()
    pieces: list[Buffer] = [_LENGTHS.pack(len(facts), len(manifest)), facts, manifest, *pieces_of(tensors, layout)]
    return [digest_of(*pieces), *pieces]


def read_facts(file: BufferedReader) -> bytes:
    """The facts alone, from where the file stands; they are not held against the digest. Raises Damaged."""
    return _head(file)[2]


def decode(file: BufferedReader, count: int) -> tuple[bytes, list[Memory]]:
    """Facts, and so many memories, from where the file stands to its end; tensors on the CPU.

    Raises:
        Damaged: these are not bytes that `encode` made.
    """
    digest, lengths, facts, manifest_bytes = _head(file)
    manifest = _exactly(file, manifest_bytes)
    data = _exactly(file, _left(file))
    if digest_of(lengths, facts, manifest, data) != digest:
        raise Damaged(f"expected bytes of digest {digest.hex()[:16]}, got others")
    try:
        layout = Layout.from_manifest(tensor_pb2.Manifest.FromString(bytes(manifest)), len(data))
        return facts, _memories(unpack(data, layout), count)
    except (DecodeError, LayoutError, ValueError, IndexError) as error:
        raise Damaged(f"expected client states, got {error}") from error


def _memories(tensors: Tensors, count: int) -> list[Memory]:
    memories: list[dict[str, Tensors]] = [{} for _ in range(count)]
    for place, tensor in tensors.items():
        number, symbol, name = place.split("/", 2)
        memories[int(number)].setdefault(symbol, {})[name] = tensor
    return list(memories)


def _head(file: BufferedReader) -> tuple[bytes, bytes, bytes, int]:
    """Digest, lengths, facts, and the bytes of the manifest that follows."""
    digest = bytes(_exactly(file, _DIGEST_BYTES))
    lengths = bytes(_exactly(file, _LENGTHS.size))
    facts_bytes, manifest_bytes = _LENGTHS.unpack(lengths)
    return digest, lengths, bytes(_exactly(file, facts_bytes)), manifest_bytes


def _exactly(file: BufferedReader, size: int) -> bytearray:
    """So many bytes; no memory is taken for what the file has not got."""
    if size > (left := _left(file)):
        raise Damaged(f"expected {size} bytes more, got {left}")
    data = bytearray(size)
    file.readinto(data)
    return data


def _left(file: BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size - file.tell()
