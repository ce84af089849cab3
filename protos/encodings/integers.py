"""int8, int4 and int2: integers with a scale for each block, rounded at random without bias."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from protos.encodings.scheme import (
    Bytes,
    EncodingError,
    Floats,
    Words,
    arithmetic_type,
    finite_in,
    require_finite,
    require_zero_where,
    scales_of,
    write_scales,
)

BLOCK = 256


@dataclass(frozen=True, slots=True)
class Integers:
    """Blocks of 256 values: the scale s, then the levels q as integers of 8, 4 or 2 bits. A value is s q.

    With m = 127, 7 or 1, s is the smallest number of the scale's type for which s m, rounded, is at least max |x|, or
    the largest for which s m is finite. q = floor(x / s + (r + 1/2) / 2^16), limited to [-m, m], where value i takes
    r from bits 16 i to 16 i + 15 of the block's words. The error is less than s (1 + 2^-16); its mean over the keys is
    within s 2^-16 of 0 for |x| < max |x| and all scales in the normal range. Sparse values stay sparse: 0 gives 0.

    Levels are two's complement, low bits first: of four levels in a byte the first has bits 0 and 1. Unused bits are 0.
    """

    bits: int
    dtype: torch.dtype
    block: int = BLOCK
    words: int = BLOCK // 4

    def nbytes(self, count: int) -> int:
        """The scale and the levels."""
        return np.dtype(arithmetic_type(self.dtype)).itemsize + -(-count * self.bits // 8)

    def encode(self, values: Floats, blocks: Bytes, words: Words) -> None:
        """See `Scheme`."""
        scales = self._scales(values)
        offset = write_scales(scales, blocks)
        rounding = np.empty_like(values)
        np.copyto(rounding, words.view(np.uint16)[:, : values.shape[1]])
        rounding *= 2.0**-16
        rounding += 2.0**-17
        # Values of a block without scale are 0 and stay 0.
        values /= np.where(scales == 0, 1, scales).astype(scales.dtype)
        values += rounding
        np.floor(values, out=values)
        np.clip(values, -self._largest, self._largest, out=values)
        blocks[:, offset:] = _packed(values.astype(np.int8), self.bits)

    def decode(self, blocks: Bytes, values: Floats, words: Words) -> None:
        """See `Scheme`."""
        del words
        scales = scales_of(blocks, self.dtype)
        with np.errstate(over="ignore"):
            largest = scales * scales.dtype.type(self._largest)
        if not finite_in(largest, self.dtype).all():
            raise EncodingError(f"expected scales whose levels are finite as {self.dtype}, got larger ones")
        packed = blocks[:, scales.dtype.itemsize :]
        require_zero_where(scales[:, 0] == 0, packed)
        levels = _unpacked(packed, self.bits, values)
        if levels.min() < -self._largest:
            raise EncodingError(f"expected levels of {-self._largest} and more, got lower ones")
        np.multiply(levels, scales, out=values)

    @property
    def _largest(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def _scales(self, values: Floats) -> Floats:
        """[blocks, 1]: s."""
        largest = np.abs(values).max(axis=1, keepdims=True)
        require_finite(np.isfinite(largest), self.dtype)
        levels = largest.dtype.type(self._largest)
        with np.errstate(over="ignore"):
            scales = largest / levels
            # Rounding to nearest may leave max |x| beyond the largest level, by much if s is denormal.
            scales = np.where(scales * levels < largest, np.nextafter(scales, np.inf, dtype=scales.dtype), scales)
            return np.where(np.isinf(scales * levels), np.nextafter(scales, 0, dtype=scales.dtype), scales)


def _packed(levels: npt.NDArray[np.int8], bits: int) -> Bytes:
    """[blocks, count] levels -> [blocks, bytes]."""
    per_byte = 8 // bits
    if per_byte == 1:
        return levels.view(np.uint8)
    if missing := -levels.shape[1] % per_byte:
        levels = np.pad(levels, ((0, 0), (0, missing)))
    # One integer has the levels of one byte, the first in its lowest byte.
    wide = levels.view(np.uint16 if per_byte == 2 else np.uint32)
    mask = 2**bits - 1
    packed = wide & mask
    for place in range(1, per_byte):
        packed |= (wide >> (8 - bits) * place) & (mask << bits * place)
    return packed.astype(np.uint8)


def _unpacked(packed: Bytes, bits: int, values: Floats) -> npt.NDArray[Any]:
    """The levels of blocks in the shape of `values`, which may be overwritten. Raises EncodingError for unused bits."""
    if bits == 8:
        return np.ascontiguousarray(packed).view(np.int8)
    count = values.shape[1]
    per_byte = 8 // bits
    table = _levels(bits, values.dtype.type)
    levels = table[packed].reshape(len(packed), -1)
    if levels.shape[1] != count and levels[:, count:].any():
        raise EncodingError(f"expected unused bits of 0 in the last byte of {per_byte} levels, got others")
    return levels[:, :count]


@cache
def _levels(bits: int, kind: type[np.floating[Any]]) -> npt.NDArray[Any]:
    """[256, levels of a byte]: the levels of each byte."""
    shifts = np.arange(0, 8, bits)
    fields = (np.arange(256)[:, None] >> shifts) & (2**bits - 1)
    return np.where(fields >= 2 ** (bits - 1), fields - 2**bits, fields).astype(kind)
