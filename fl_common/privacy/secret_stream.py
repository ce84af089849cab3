"""Streams of random bytes from a secret: ChaCha20 with keys that HKDF-SHA256 derives (RFC 8439, RFC 5869).

The same secret and the same place give the same bytes, in another process too. Without the secret they look like
random bytes, whatever places are known.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

SECRET_BYTES = 32
_MOST_BYTES = 64 << 32
"""Bytes of one stream: ChaCha20 counts blocks of 64 bytes in 32 bits."""


def derived(secret: bytes, *place: bytes | str | int) -> bytes:
    """A key of 32 bytes for a place: HKDF-Expand for one block. No two places have the same text."""
    parts = (part if isinstance(part, bytes) else str(part).encode() for part in place)
    info = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(secret, b"impetus privacy" + info + b"\x01", hashlib.sha256)


class SecretStream:
    """The streams of one piece of work; callable as `algorithms.privacy.random_bits.RandomBytes`."""

    def __init__(self, key: bytes) -> None:
        """key: of `derived`, used for this work alone. Raises ValueError for another size."""
        if len(key) != SECRET_BYTES:
            raise ValueError(f"expected a key of {SECRET_BYTES} bytes, got {len(key)}")
        self._key = key

    def __call__(self, purpose: str, step: int, count: int) -> bytearray:
        """The first `count` bytes of the stream for a purpose and a step."""
        if not 0 <= count <= _MOST_BYTES:
            raise ValueError(f"expected at most {_MOST_BYTES} bytes of a stream, got {count}")
        cipher = Cipher(ChaCha20(derived(self._key, purpose, step), bytes(16)), mode=None).encryptor()
        stream = bytearray(count)
        cipher.update_into(bytes(count), stream)
        return stream
