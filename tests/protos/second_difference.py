"""A slow reader of differences, written from the comments of `Difference` in tensor.proto and from nothing else."""

from __future__ import annotations

import zlib


def bundle_of(base: bytes, difference: bytes, word_bytes: int) -> bytes:
    """The bundle that a valid difference makes of a base."""
    made, at = b"", 0
    while len(made) < len(base):
        old = base[len(made) : len(made) + 2**20]
        length = int.from_bytes(difference[at : at + 4], "little")
        made += block_of(old, zlib.decompress(difference[at + 4 : at + 4 + length], wbits=-15), word_bytes)
        at += 4 + length
    return made


def block_of(old: bytes, inflated: bytes, w: int) -> bytes:
    """One block."""
    m = len(old) // w
    words = []
    for i in range(m):
        z = sum(inflated[j * m + i] << 8 * j for j in range(w))
        d = z // 2 if z % 2 == 0 else 2 ** (8 * w) - (z + 1) // 2
        b = int.from_bytes(old[i * w : (i + 1) * w], "little")
        words.append(((b + d) % 2 ** (8 * w)).to_bytes(w, "little"))
    rest = bytes((b + d) % 256 for b, d in zip(old[w * m :], inflated[w * m :], strict=True))
    return b"".join(words) + rest
