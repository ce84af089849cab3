"""Digests name byte strings on the wire, on disk and in texts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from blake3 import blake3

from protos.fl.v1 import tensor_pb2

_DIGEST_BYTES = 32
_DIGEST_PREFIX = "blake3:"


def digest_of(*buffers: bytes | bytearray | memoryview, pieces: Iterable[memoryview] = ()) -> bytes:
    """BLAKE3-256 of the concatenated buffers: 32 bytes. `pieces` come last, and are taken one after the other."""
    hasher = blake3()
    for buffer in chain(buffers, pieces):
        hasher.update(buffer)
    return hasher.digest()


def digest_message(raw: bytes) -> tensor_pb2.Digest:
    """A digest as a message; `digest_bytes` reverts it. Raises ValueError unless it has 32 bytes."""
    return tensor_pb2.Digest(algorithm=tensor_pb2.DIGEST_ALGORITHM_BLAKE3_256, value=_checked_digest(raw))


def digest_bytes(digest: tensor_pb2.Digest) -> bytes:
    """The 32 bytes of a BLAKE3-256 digest. Raises ValueError for other algorithms and lengths."""
    if digest.algorithm != tensor_pb2.DIGEST_ALGORITHM_BLAKE3_256:
        raise ValueError(f"expected digest algorithm BLAKE3_256, got number {digest.algorithm}")
    return _checked_digest(digest.value)


def digest_text(raw: bytes) -> str:
    """A digest as text: "blake3:" and 64 hex digits."""
    return _DIGEST_PREFIX + _checked_digest(raw).hex()


def _checked_digest(raw: bytes) -> bytes:
    if len(raw) != _DIGEST_BYTES:
        raise ValueError(f"expected a digest of {_DIGEST_BYTES} bytes, got {len(raw)}")
    return raw
