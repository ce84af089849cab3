"""EDEN: a random rotation, and the nearest of a few levels for each rotated value.

Source: Vargaftik et al., "EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning",
ICML 2022. The rotation is a Hadamard matrix with random signs, as in the paper's experiments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from protos.encodings.packing import Numbers, pack_bits, packed_bytes
from protos.encodings.scheme import (
    Bytes,
    Floats,
    Words,
    finite_in,
    require_finite,
    require_zero_where,
    scale_bytes,
    scales_of,
    write_scales,
)

BLOCK = 4096

LEVELS: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {1: (817,), 2: (464, 1547), 4: (131, 397, 673, 965, 1286, 1657, 2119, 2798)}
)
"""Bits -> positive levels, in units of 2^-10: those of Lloyd and Max for the standard normal distribution, rounded.

Sums of 4096 of them are integers below 2^24. So a rotation of levels is exact in float32, in any order of additions.
"""
_UNIT = 2.0**-10


@dataclass(frozen=True, slots=True)
class Eden:
    """Blocks of 4096 values: the scale S, then the indices of levels in 1, 2 or 4 bits.

    The n values of a last block are followed by zeros up to the next power of two, N. With the signs D (-1 where bit i
    of the block's words is 1), the Hadamard matrix H of order N (H_ij is -1 to the number of bits that i and j share)
    and y = H D x, index i is that of the level c_i that is nearest to y_i sqrt(N) / |y|; indices count all levels
    upwards, -c_max first. S = |x|^2 2^h / <c, y> with h = floor(log2(N) / 2). The decoded block is the first n values
    of S D (H c) 2^-h: the sums are exact, and the product with S is rounded once. A block of zeros has only zero bytes.

    <decoded, x> = |x|^2, so the error has the length |x| tan(angle of c and y). For a block of many values that
    is |x| sqrt(d / (1 - d)), with d the distortion of the levels for normal values: 0.3634, 0.1175 and 0.0096 for 1, 2
    and 4 bits. The mean of the error over the keys is 0 in the direction of x. In the other directions it is 0 for a
    uniform rotation. For this one it is small if many values contribute to a block, and large if two or three do.
    """

    bits: int
    dtype: torch.dtype
    block: int = BLOCK
    words: int = BLOCK // 64

    def nbytes(self, count: int) -> int:
        """The scale, and the indices of the next power of two of values."""
        return scale_bytes(self.dtype) + packed_bytes(_order(count), self.bits)

    def encode(self, values: Floats, blocks: Bytes, words: Words) -> None:
        """See `Scheme`."""
        count = values.shape[1]
        order = _order(count)
        largest = np.abs(values).max(axis=1, keepdims=True)
        require_finite(np.isfinite(largest), self.dtype)
        values = values / np.where(largest == 0, 1, largest).astype(values.dtype)
        values = np.pad(values, ((0, 0), (0, order - count))) if order > count else values
        _flip_signs(values, words)
        rotated = _rotated(values)
        squares = np.vecdot(rotated, rotated)[:, None]
        packed = pack_bits(self._nearest(rotated, np.sqrt(squares / order)), self.bits)
        along = np.vecdot(_levels(self.bits, values.dtype.char, order).read(packed, order), rotated)[:, None]
        with np.errstate(over="ignore"):
            scales: Floats = largest * (squares / order / np.where(along == 0, 1, along).astype(along.dtype))
        require_finite(np.isfinite(scales), self.dtype)
        packed[scales[:, 0] == 0] = 0
        blocks[:, write_scales(scales, blocks) :] = packed
        large = self._large(scales, order)
        if large.any():
            self.decode(blocks[large], np.empty((int(large.sum()), count), values.dtype), words[large])

    def decode(self, blocks: Bytes, values: Floats, words: Words) -> None:
        """See `Scheme`."""
        count = values.shape[1]
        order = _order(count)
        scales = scales_of(blocks, self.dtype)
        packed = blocks[:, scales.dtype.itemsize :]
        require_zero_where(scales[:, 0] == 0, packed)
        rotated = _rotated(_levels(self.bits, scales.dtype.char, order).read(packed, order))
        with np.errstate(over="ignore"):
            np.multiply(rotated[:, :count], scales, out=values)
        _flip_signs(values, words)
        large = self._large(scales, order)
        if large.any():
            require_finite(finite_in(values[large], self.dtype), self.dtype)

    def _nearest(self, rotated: Floats, units: Floats) -> Bytes:
        """Indices of the levels that are nearest to `rotated`. units: [blocks, 1], the length of a level of 1."""
        levels = np.array(LEVELS[self.bits]) * _UNIT
        steps = len(levels)
        indices = np.signbit(rotated).view(np.uint8) * np.uint8(2 * steps - 1)
        magnitudes = np.abs(rotated, out=rotated.copy())
        above = np.empty(rotated.shape, np.bool_)
        places = np.full(rotated.shape, steps, np.uint8)
        for boundary in (levels[1:] + levels[:-1]) / 2:
            np.greater(magnitudes, (units * boundary).astype(rotated.dtype), out=above)
            places += above.view(np.uint8)
        # Negative values have the mirrored index: all bits of it are inverted.
        np.bitwise_xor(indices, places, out=indices)
        return indices

    def _large(self, scales: Floats, order: int) -> npt.NDArray[np.bool_]:
        """[blocks]: where a decoded value could be infinite. A block's values are at most |c_max| N S."""
        bound = max(LEVELS[self.bits]) * _UNIT * order / 2.0 ** _halvings(order)
        with np.errstate(over="ignore"):
            return ~finite_in(scales[:, 0] * scales.dtype.type(bound), self.dtype)


def _order(count: int) -> int:
    """The first power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _halvings(order: int) -> int:
    """h: 2^h is the root of the order, or the next lower power of two."""
    return (order.bit_length() - 1) // 2


def _flip_signs(values: Floats, words: Words) -> None:
    """Multiply each value by -1 where its bit in the block's words is 1."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : values.shape[1]]
    raw = values.view(f"<u{values.dtype.itemsize}")
    signs = bits.astype(raw.dtype)
    np.left_shift(signs, 8 * raw.dtype.itemsize - 1, out=signs)
    np.bitwise_xor(raw, signs, out=raw)


def _rotated(values: Floats) -> Floats:
    """H x for each row x, whose length is a power of two."""
    # A row is a matrix X of `low` columns, and H x is the matrix H X H with Hadamard matrices of its two orders.
    low = min(values.shape[1], 64)
    grid = values.reshape(len(values), -1, low)
    # numpy multiplies such small matrices in the calling thread, whatever the precision that torch is set to.
    rows = np.matmul(grid, _hadamard(low, values.dtype.char))
    columns: Floats = np.matmul(_hadamard(grid.shape[1], values.dtype.char), rows)
    return columns.reshape(values.shape)


@cache
def _hadamard(order: int, kind: str) -> npt.NDArray[Any]:
    matrix = np.ones((1, 1), kind)
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


@cache
def _levels(bits: int, kind: str, order: int) -> Numbers:
    """2^-h times the level of each index."""
    upper = np.array(LEVELS[bits]) * _UNIT / 2.0 ** _halvings(order)
    return Numbers(np.concatenate([-upper[::-1], upper]).astype(kind))
