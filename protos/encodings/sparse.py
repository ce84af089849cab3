"""topk and randk: few values of each block, unchanged; all others decode to 0.

What is not sent is the sender's to keep and to add to its next bundle (error feedback); these encodings are biased.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from protos.encodings.scheme import Bytes, EncodingError, Floats, Words, finite_in, require_finite

BLOCK = 4096
_POSITION_BITS = 12
_POSITION_BYTES = 2

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TopK:
    """Keeps the k = ceil(fraction n) largest values by magnitude of each block of 4096; of equal ones, the first.

    A block has their positions in rising order, two bytes each, and then the values in the tensor's dtype. n is the
    number of values in the block, and the product is computed in float64. No randomness.
    """

    fraction: float
    dtype: torch.dtype
    block: int = BLOCK
    words: int = 0

    def nbytes(self, count: int) -> int:
        """The positions and the values."""
        return _kept(self.fraction, count) * (_POSITION_BYTES + self.dtype.itemsize)

    def encode(self, values: Floats, blocks: Bytes, words: Words) -> None:
        """See `Scheme`."""
        del words
        positions = _largest(values, _kept(self.fraction, values.shape[1]), self.dtype)
        raw = positions.astype("<u2").view(np.uint8)
        blocks[:, : raw.shape[1]] = raw
        blocks[:, raw.shape[1] :] = _written(values, positions, self.dtype)

    def decode(self, blocks: Bytes, values: Floats, words: Words) -> None:
        """See `Scheme`."""
        del words
        kept = _kept(self.fraction, values.shape[1])
        positions = blocks[:, : kept * _POSITION_BYTES].copy().view("<u2").astype(np.int64)
        if (positions[:, -1] >= values.shape[1]).any() or (np.diff(positions, axis=1) <= 0).any():
            raise EncodingError(f"expected rising positions below {values.shape[1]}, got others")
        _place(blocks[:, kept * _POSITION_BYTES :], positions, values, self.dtype)


@dataclass(frozen=True, slots=True)
class RandomK:
    """Keeps k = ceil(fraction n) values of each block of 4096, drawn at random, with the bytes of their dtype.

    Position i has the number 2^12 r + i, with r from bits 16 i to 16 i + 15 of the block's words. The k positions below
    n with the lowest numbers are sent, in rising order. They need no bytes, because the receiver knows the words.
    """

    fraction: float
    dtype: torch.dtype
    block: int = BLOCK
    words: int = BLOCK // 4

    def nbytes(self, count: int) -> int:
        """The values."""
        return _kept(self.fraction, count) * self.dtype.itemsize

    def encode(self, values: Floats, blocks: Bytes, words: Words) -> None:
        """See `Scheme`."""
        require_finite(np.isfinite(np.abs(values).max(axis=1)), self.dtype)
        blocks[...] = _written(values, self._positions(values, words), self.dtype)

    def decode(self, blocks: Bytes, values: Floats, words: Words) -> None:
        """See `Scheme`."""
        _place(blocks, self._positions(values, words), values, self.dtype)

    def _positions(self, values: Floats, words: Words) -> Positions:
        count = values.shape[1]
        kept = _kept(self.fraction, count)
        numbers: npt.NDArray[np.uint32] = words.view("<u2")[:, :count].astype(np.uint32)
        np.left_shift(numbers, _POSITION_BITS, out=numbers)
        np.bitwise_or(numbers, np.arange(count, dtype=np.uint32), out=numbers)
        numbers.partition(kept - 1, axis=1)
        positions: Positions = numbers[:, :kept].astype(np.int64)
        positions &= BLOCK - 1
        positions.sort(axis=1)
        return positions


def _kept(fraction: float, count: int) -> int:
    return math.ceil(fraction * count)


def _largest(values: Floats, kept: int, dtype: torch.dtype) -> Positions:
    """[blocks, kept]: positions of the largest magnitudes, rising."""
    blocks, count = values.shape
    # Without their signs, floats have the order of the integers with the same bits. NaN is larger than infinity.
    kind = np.int32 if values.dtype == np.float32 else np.int64
    magnitudes = np.bitwise_and(values.view(kind), np.iinfo(kind).max)
    require_finite(np.isfinite(magnitudes.max(keepdims=True).view(values.dtype)), dtype)
    threshold = np.partition(magnitudes, count - kept, axis=1)[:, count - kept, None]
    chosen = magnitudes >= threshold
    if int(np.count_nonzero(chosen)) != blocks * kept:
        equal = magnitudes == threshold
        surplus = np.count_nonzero(chosen, axis=1, keepdims=True) - kept
        wanted = np.count_nonzero(equal, axis=1, keepdims=True) - surplus
        chosen &= ~equal | (np.cumsum(equal, axis=1) <= wanted)
    positions: Positions = (np.flatnonzero(chosen) % count).reshape(blocks, kept)
    return positions


def _written(values: Floats, positions: Positions, dtype: torch.dtype) -> Bytes:
    """The bytes of the values at these positions."""
    chosen = torch.from_numpy(np.take_along_axis(values, positions, axis=1)).to(dtype)
    raw: Bytes = chosen.view(torch.uint8).numpy()
    return raw


def _place(raw: Bytes, positions: Positions, values: Floats, dtype: torch.dtype) -> None:
    """Write values from their bytes at their positions, and 0 elsewhere."""
    chosen = torch.from_numpy(raw.copy()).view(dtype).to(torch.from_numpy(values).dtype).numpy()
    require_finite(finite_in(chosen, dtype), dtype)
    values[...] = 0
    np.put_along_axis(values, positions, chosen, axis=1)
