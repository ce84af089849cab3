"""Masks: the output of a generator with a key of 256 bits, added to numbers modulo a power of two, chunk by chunk.

Memory does not grow with the update or with the number of masks. A masked update is the values, each in value_bits / 8
bytes, little-endian, then the scalars in 8 bytes each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES, ChaCha20
from cryptography.hazmat.primitives.ciphers.modes import CTR

from fl_common.privacy.secret_stream import derived
from fl_common.secure_aggregation.terms import Terms

Words = npt.NDArray[Any]
"""Unsigned numbers, [values of a chunk]. Arithmetic on them is modulo 2^bits of their type."""
WORDS = 2**16
"""Numbers of a chunk: with their masks they fit a processor's second cache."""
_ZEROS = bytes(8 * WORDS)
_SCALAR_BYTES = 8


def _aes(key: bytes) -> CipherContext:
    return Cipher(AES(key), CTR(bytes(16))).encryptor()


def _chacha(key: bytes) -> CipherContext:
    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()


_GENERATORS: Mapping[str, Callable[[bytes], CipherContext]] = {"aes-256-ctr": _aes, "chacha20": _chacha}
"""Suite of the terms -> its generator. Each key is used for one stream, so the nonce is 0."""


class Mask(NamedTuple):
    """One mask of an update."""

    key: bytes
    """32 bytes, of one pair or one client, for one secure aggregation."""
    negative: bool = False
    """Whether it is taken away: of two clients that share a mask one adds it, and the other takes it away."""


class _Streams:
    """The streams of several masks. Each call goes on where the last one ended."""

    def __init__(self, suite: str, masks: Sequence[Mask], purpose: str) -> None:
        self._streams = [(_GENERATORS[suite](derived(mask.key, purpose)), mask.negative) for mask in masks]
        self._buffer = bytearray(8 * WORDS)

    def add_to(self, words: Words, *, inverted: bool = False) -> None:
        """Add the next numbers of each stream. inverted: take them away."""
        size = words.nbytes
        raw, zeros = memoryview(self._buffer)[:size], memoryview(_ZEROS)[:size]
        numbers = np.frombuffer(raw, words.dtype)
        for stream, negative in self._streams:
            stream.update_into(zeros, raw)
            (np.subtract if negative != inverted else np.add)(words, numbers, out=words)


def masked(terms: Terms, values: npt.NDArray[Any], scalars: Sequence[int], masks: Sequence[Mask]) -> Iterator[bytes]:
    """The bytes of a masked update, in pieces.

    Args:
        terms: for the shape and the suite.
        values: [terms.values] whole numbers; they count modulo 2^value_bits.
        scalars: [terms.scalars] whole numbers; they count modulo 2^64.
        masks: those of the update.
    """
    streams = _Streams(terms.settings.suite, masks, "values")
    for start in range(0, terms.values, WORDS):
        words = values[start : start + WORDS].astype(_word(terms.value_bits))
        streams.add_to(words)
        yield _packed(words, terms.value_bits)
    if scalars:
        words = np.array([number % 2**64 for number in scalars], np.uint64)
        _Streams(terms.settings.suite, masks, "scalars").add_to(words)
        yield words.astype("<u8").tobytes()


Reader = Callable[[int, int], bytes | bytearray | memoryview]
"""(offset, count) -> these bytes of a masked update."""


class Unmasked:
    """The sum of masked updates without the masks that are left in it. Blocking; it may be read once or more."""

    def __init__(self, terms: Terms, updates: Sequence[Reader], masks: Sequence[Mask]) -> None:
        """updates: of the survivors, in any order. masks: what is left in the sum of theirs."""
        self._terms, self._updates, self._masks = terms, updates, masks

    def values(self) -> Iterator[npt.NDArray[np.int64]]:
        """The signed sums of the values, a chunk at a time."""
        bits = self._terms.value_bits
        width, streams = bits // 8, _Streams(self._terms.settings.suite, self._masks, "values")
        for start in range(0, self._terms.values, WORDS):
            count = min(WORDS, self._terms.values - start)
            total = np.zeros(count, _word(bits))
            for read in self._updates:
                total += _unpacked(read(width * start, width * count), bits, count)
            streams.add_to(total, inverted=True)
            yield _signed(total, bits)

    def scalars(self) -> list[int]:
        """The sums of the scalars, modulo 2^64."""
        count = self._terms.scalars
        if not count:
            return []
        total = np.zeros(count, np.uint64)
        start = self._terms.size_bytes - _SCALAR_BYTES * count
        for read in self._updates:
            total += np.frombuffer(read(start, _SCALAR_BYTES * count), "<u8").astype(np.uint64)
        _Streams(self._terms.settings.suite, self._masks, "scalars").add_to(total, inverted=True)
        return [int(number) for number in total]


def _word(bits: int) -> np.dtype[Any]:
    """The unsigned type in which numbers of so many bits are computed."""
    size = next(size for size in (1, 2, 4, 8) if 8 * size >= bits)
    return np.dtype(f"<u{size}")


def _packed(words: Words, bits: int) -> bytes:
    """The lower bits / 8 bytes of each number."""
    size, width = words.dtype.itemsize, bits // 8
    if (size, width) == (4, 3) and not len(words) % 4:
        return _three_of_four(words & np.uint32(0xFFFFFF)).tobytes()
    return (words if size == width else words.view(np.uint8).reshape(-1, size)[:, :width]).tobytes()


def _unpacked(raw: bytes | bytearray | memoryview, bits: int, count: int) -> Words:
    """Numbers whose lower bits are those of `_packed`. The others may be any, since sums count modulo 2^bits."""
    word, width = _word(bits), bits // 8
    if len(raw) != count * width:
        raise ValueError(f"expected {count * width} bytes of a masked update, got {len(raw)}")
    if word.itemsize == width:
        return np.frombuffer(raw, word)
    if (word.itemsize, width) == (4, 3) and not count % 4:
        return _four_of_three(np.frombuffer(raw, word))
    words = np.zeros((count, word.itemsize), np.uint8)
    words[:, :width] = np.frombuffer(raw, np.uint8).reshape(count, width)
    return words.reshape(-1).view(word)


def _three_of_four(words: Words) -> Words:
    """Four numbers of 24 bits in three of 32. Shifts of whole numbers are several times as fast as copies of bytes."""
    first, second, third, fourth = words.reshape(-1, 4).T
    made = np.empty((len(words) // 4, 3), words.dtype)
    made[:, 0] = first | second << 24
    made[:, 1] = second >> 8 | third << 16
    made[:, 2] = third >> 16 | fourth << 8
    return made


def _four_of_three(packed: Words) -> Words:
    """The numbers of `_three_of_four`, with any bits above the 24."""
    first, second, third = packed.reshape(-1, 3).T
    made = np.empty((len(packed) // 3, 4), packed.dtype)
    made[:, 0] = first
    made[:, 1] = first >> 24 | second << 8
    made[:, 2] = second >> 16 | third << 16
    made[:, 3] = third >> 8
    return made.reshape(-1)


def _signed(words: Words, bits: int) -> npt.NDArray[np.int64]:
    """Numbers modulo 2^bits as those from -2^(bits - 1) to below 2^(bits - 1)."""
    unused = 64 - bits
    return (words.astype(np.uint64) << np.uint64(unused)).view(np.int64) >> np.int64(unused)
