"""Differences: the bytes of a bundle as they differ from those of another one, compressed without loss.

The comments of `Difference` in protos/fl/v1/tensor.proto define the bytes. Two models of successive rounds are close to
each other, so words of the one minus words of the other are small numbers, whose high bytes are mostly 0.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from protos.chunks import Buffer

BLOCK_BYTES = 1 << 20
"""Bytes of a bundle that are compressed together."""
WORD_BYTES = (1, 2, 4, 8)
"""Bytes that a word may have."""

_LEVEL, _MEMORY = 6, 9
"""zlib's settings. They change size and speed, and no reader depends on them."""

_LENGTH_BYTES = 4
_RAW = -15
"""zlib's number for a DEFLATE stream without header and checksum."""

_Bytes = npt.NDArray[np.uint8]


class DifferenceError(ValueError):
    """Bytes that are no difference of this size."""


def make_difference(base: Buffer, bundle: Buffer, word_bytes: int) -> bytes | None:
    """The difference of a bundle to a base of the same size; None if it would not be smaller than the bundle.

    Raises ValueError for different sizes or a word of another size than WORD_BYTES.
    """
    old, new = _checked(base, bundle, word_bytes)
    # The high bytes of words have runs of zeros. There are no other repeats, and to search for them takes long.
    strategy = zlib.Z_HUFFMAN_ONLY if word_bytes == 1 else zlib.Z_RLE
    parts: list[bytes] = []
    left = len(new)
    for start in range(0, len(new), BLOCK_BYTES):
        end = start + BLOCK_BYTES
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, _MEMORY, strategy)
        packed = packer.compress(_planes(old[start:end], new[start:end], word_bytes).data) + packer.flush()
        parts += [len(packed).to_bytes(_LENGTH_BYTES, "little"), packed]
        left -= _LENGTH_BYTES + len(packed)
        if left <= 0:
            return None
    return b"".join(parts) or None


def apply_difference(base: Buffer, difference: Buffer, word_bytes: int, into: memoryview) -> None:
    """Write the bundle that a difference makes of a base. All bytes of `into` are overwritten.

    The difference is untrusted: memory besides `into` is a few blocks, whatever it has.

    Raises:
        DifferenceError: it is not a difference between bundles of this size.
        ValueError: base and `into` differ in size, or a word has another size than WORD_BYTES.
    """
    old, new = _checked(base, into, word_bytes)
    streams = _streams(memoryview(difference).cast("B"), len(new))
    for start, planes in zip(range(0, len(new), BLOCK_BYTES), streams, strict=True):
        end = start + BLOCK_BYTES
        _restore(old[start:end], planes, word_bytes, new[start:end])


def _checked(base: Buffer, bundle: Buffer, word_bytes: int) -> tuple[_Bytes, _Bytes]:
    if word_bytes not in WORD_BYTES:
        raise ValueError(f"expected words of 1, 2, 4 or 8 bytes, got {word_bytes}")
    old, new = np.frombuffer(base, np.uint8), np.frombuffer(bundle, np.uint8)
    if len(old) != len(new):
        raise ValueError(f"expected a base of {len(new)} bytes as the bundle has, got {len(old)}")
    return old, new


def _streams(difference: memoryview, size: int) -> Iterator[_Bytes]:
    """The inflated bytes of each block of a bundle of `size` bytes. Raises DifferenceError."""
    at = 0
    for start in range(0, size, BLOCK_BYTES):
        block = start // BLOCK_BYTES
        begin = at + _LENGTH_BYTES
        end = begin + int.from_bytes(difference[at:begin], "little") if begin <= len(difference) else begin
        if end > len(difference):
            raise DifferenceError(f"block {block}: expected bytes up to {end}, got {len(difference)}")
        yield _inflated(difference[begin:end], min(BLOCK_BYTES, size - start), block)
        at = end
    if at != len(difference):
        raise DifferenceError(f"expected {at} bytes for a bundle of {size}, got {len(difference)}")


def _inflated(stream: memoryview, size: int, block: int) -> _Bytes:
    """The bytes of one stream. Raises DifferenceError unless it has exactly `size` of them and ends there."""
    unpacker = zlib.decompressobj(_RAW)
    try:
        data = unpacker.decompress(stream, size + 1)
    except zlib.error as error:
        raise DifferenceError(f"block {block}: expected a DEFLATE stream, got one that fails: {error}") from None
    if len(data) != size or not unpacker.eof or unpacker.unused_data:
        raise DifferenceError(f"block {block}: expected a DEFLATE stream of {size} bytes that ends with the block")
    return np.frombuffer(data, np.uint8)


def _planes(old: _Bytes, new: _Bytes, word_bytes: int) -> _Bytes:
    """The bytes of a block that are compressed."""
    whole = len(new) // word_bytes * word_bytes
    words = _words(new[:whole], word_bytes) - _words(old[:whole], word_bytes)
    # 0, -1, 1, -2, ... become 0, 1, 2, 3, ...: the high bytes of small numbers of both signs are 0.
    words = (words << 1) ^ (words >> (8 * word_bytes - 1)) * words.dtype.type(2 ** (8 * word_bytes) - 1)
    planes = words.view(np.uint8).reshape(-1, word_bytes).T
    return np.concatenate([planes.reshape(-1), new[whole:] - old[whole:]])


def _restore(old: _Bytes, planes: _Bytes, word_bytes: int, into: _Bytes) -> None:
    """The inverse of `_planes`."""
    whole = len(into) // word_bytes * word_bytes
    words = _words(np.ascontiguousarray(planes[:whole].reshape(word_bytes, -1).T).reshape(-1), word_bytes)
    words = (words >> 1) ^ (words & 1) * words.dtype.type(2 ** (8 * word_bytes) - 1)
    into[:whole] = (words + _words(old[:whole], word_bytes)).view(np.uint8)
    into[whole:] = planes[whole:] + old[whole:]


def _words(data: _Bytes, word_bytes: int) -> npt.NDArray[Any]:
    """Whole words as unsigned numbers, whose sums wrap around."""
    return data.view(f"<u{word_bytes}")
