"""int8, int4 and int2: integers with a scale for each block, rounded at random without bias."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from protos.encodings.packing import Numbers, pack_bits, packed_bytes
from protos.encodings.scheme import (
    Bytes,
    EncodingError,
    Floats,
    Words,
    finite_in,
    require_finite,
    require_zero_where,
    scale_bytes,
    scales_of,
    write_scales,
)

BLOCK = 256


@dataclass(frozen=True, slots=True)
class Integers:
    """Blocks of 256 values: the scale s, then the levels q as integers of 8, 4 or 2 bits. A value is s q.

    With m = 127, 7 or 1, s is max |x| / m, and the next larger number if max |x| / s, rounded, would be over m, and the
    next smaller one if s m would be infinite. q = floor(x / s + (r + 1/2) / 2^16), limited to [-m, m], where value i
    takes r from bits 16 i to 16 i + 15 of the block's words. The error is less than s (1 + 2^-16), and rounding to the
    dtype; its mean over the keys is within s 2^-16 of 0. Sparse values stay sparse: 0 gives 0.

    Levels are two's complement, low bits first: of four levels in a byte the first has bits 0 and 1. Unused bits are 0.
    """

    bits: int
    dtype: torch.dtype
    block: int = BLOCK
    words: int = BLOCK // 4

    def nbytes(self, count: int) -> int:
        """The scale and the levels."""
        return scale_bytes(self.dtype) + packed_bytes(count, self.bits)

    def encode(self, values: Floats, blocks: Bytes, words: Words) -> None:
        """See `Scheme`."""
        scales, over = self._scales(values)
        offset = write_scales(scales, blocks)
        # Values of a block without scale are 0 and stay 0.
        levels = values / np.where(scales == 0, 1, scales).astype(scales.dtype)
        rounding = np.empty_like(levels)
        np.copyto(rounding, words.view("<u2")[:, : values.shape[1]])
        rounding *= 2.0**-16
        rounding += 2.0**-17
        levels += rounding
        np.floor(levels, out=levels)
        if over:
            np.clip(levels, -self._largest, self._largest, out=levels)
        blocks[:, offset:] = pack_bits(levels.astype(np.int8).view(np.uint8), self.bits)

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
        if self.bits == 8:
            levels: npt.NDArray[Any] = packed.view(np.int8)
        else:
            levels = _levels(self.bits, values.dtype.char).read(packed, values.shape[1])
        if levels.min() < -self._largest:
            raise EncodingError(f"expected levels of {-self._largest} and more, got lower ones")
        np.copyto(values, levels)
        values *= scales

    @property
    def _largest(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _scales(self, values: Floats) -> tuple[Floats, bool]:
        """[blocks, 1]: s, and whether a level may be over m."""
        largest = np.abs(values).max(axis=1, keepdims=True)
        require_finite(np.isfinite(largest), self.dtype)
        m = largest.dtype.type(self._largest)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            scales = largest / m
            # A denormal s may be far from the quotient. Then levels would be over m.
            scales = np.where(largest / scales > m, np.nextafter(scales, np.inf, dtype=scales.dtype), scales)
            over = np.isinf(scales * m)
            scales = np.where(over, np.nextafter(scales, 0, dtype=scales.dtype), scales)
        return scales, bool(over.any())


@cache
def _levels(bits: int, kind: str) -> Numbers:
    """The level of each field in two's complement."""
    fields = np.arange(2**bits)
    return Numbers(np.where(fields >= 2 ** (bits - 1), fields - 2**bits, fields).astype(kind))
