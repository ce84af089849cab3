"""The interface of a scheme: how blocks of values are written as bytes."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.floating[Any]]
"""Values in the arithmetic type of their tensor's dtype: float64 for float64, float32 for all others."""
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]


class EncodingError(ValueError):
    """A value cannot be encoded, or bytes are not an encoding. The message has what was expected and what came."""


class Scheme(Protocol):
    """An encoding of tensors of one dtype, in blocks that do not depend on one another."""

    @property
    def block(self) -> int:
        """Values of a full block. The last block of a tensor may have fewer."""

    @property
    def words(self) -> int:
        """Random words that every block takes, the last one too: a multiple of 4."""

    def nbytes(self, count: int) -> int:
        """Bytes of a block of `count` values, 1 <= count <= block."""

    def encode(self, values: Floats, blocks: Bytes, words: Words) -> None:
        """Write blocks.

        Args:
            values: [blocks, values of a block], contiguous. They are not changed.
            blocks: [blocks, bytes of a block], contiguous, to be written completely.
            words: [blocks, words of a block].

        Raises:
            EncodingError: a value is not finite, or would not be after decoding.
        """

    def decode(self, blocks: Bytes, values: Floats, words: Words) -> None:
        """Read blocks into `values`; shapes as in `encode`.

        Raises:
            EncodingError: bytes that `encode` never writes. Decoded values are finite in the tensor's dtype.
        """


def arithmetic_type(dtype: torch.dtype) -> type[np.floating[Any]]:
    """The type in which values of a dtype are computed and their scales stored."""
    return np.float64 if dtype == torch.float64 else np.float32


def finite_in(values: Floats, dtype: torch.dtype) -> npt.NDArray[np.bool_]:
    """Which values are finite after conversion to a dtype."""
    usable: npt.NDArray[np.bool_] = np.abs(values) < _TOO_LARGE.get(dtype, np.inf)
    return usable


_TOO_LARGE = {torch.float16: 65520.0, torch.bfloat16: 2.0**128 - 2.0**119}
"""The smallest numbers that a conversion rounds to infinity: half a step above the largest of the dtype."""


def require_finite(finite: npt.NDArray[np.bool_], dtype: torch.dtype) -> None:
    """Raises EncodingError for values or decoded values that are not finite."""
    if not finite.all():
        raise EncodingError(f"expected values that are finite, also decoded to {dtype}, got NaN or too large ones")


def scale_bytes(dtype: torch.dtype) -> int:
    """Bytes of a scale: 8 for float64, 4 for all others."""
    return np.dtype(arithmetic_type(dtype)).itemsize


def scales_of(blocks: Bytes, dtype: torch.dtype) -> Floats:
    """[blocks, 1]: the scale with which each block begins.

    Raises:
        EncodingError: a scale is negative or not finite. Minus zero is negative.
    """
    scales = blocks[:, : scale_bytes(dtype)].copy().view(arithmetic_type(dtype))
    if np.signbit(scales).any() or not np.isfinite(scales).all():
        raise EncodingError("expected scales that are finite and not negative, got others")
    return scales


def write_scales(scales: Floats, blocks: Bytes) -> int:
    """Write the scale of each block, [blocks, 1], at its start; returns the offset behind it."""
    width = scales.dtype.itemsize
    blocks[:, :width] = scales.view(np.uint8)
    return width


def require_zero_where(no_scale: npt.NDArray[np.bool_], payload: Bytes) -> None:
    """Raises EncodingError for a block with scale 0 and other bytes than 0."""
    if no_scale.any() and payload[no_scale].any():
        raise EncodingError("expected zero bytes behind a scale of 0, got others")
