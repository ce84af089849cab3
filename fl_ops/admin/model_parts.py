"""The messages that send a model to the coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from blake3 import blake3

from protos.chunks import make_chunk
from protos.digests import digest_message
from protos.fl.v1 import admin_pb2

CHUNK_BYTES = 512 << 10
"""The largest chunk that a coordinator takes."""


def model_parts(file: BinaryIO) -> Iterator[admin_pb2.UploadModelRequest]:
    """Header and chunks of an open file, which is read twice: for its digest, and to be sent. Raises OSError."""
    hasher, size = blake3(), 0
    file.seek(0)
    while block := file.read(CHUNK_BYTES):
        hasher.update(block)
        size += len(block)
    header = admin_pb2.UploadModelHeader(size_bytes=size, digest=digest_message(hasher.digest()))
    yield admin_pb2.UploadModelRequest(header=header)
    file.seek(0)
    offset = 0
    while block := file.read(CHUNK_BYTES):
        chunk = make_chunk(block, 0, len(block))
        chunk.offset = offset
        yield admin_pb2.UploadModelRequest(chunk=chunk)
        offset += len(block)
