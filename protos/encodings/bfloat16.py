"""bfloat16: the upper half of a float32, rounded to the nearest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from protos.encodings.scheme import Bytes, EncodingError, Floats, Words


@dataclass(frozen=True, slots=True)
class BFloat16:
    """Each value as a bfloat16 in two bytes, rounded to the nearest, ties to even. No randomness.

    A float64 is rounded to float32 first. The error of a value x is at most 2^-8 |x|, or 2^-134 below the normal range;
    decoding to float16 rounds once more.
    """

    dtype: torch.dtype
    block: int = 1
    words: int = 0

    def nbytes(self, count: int) -> int:
        """Two for each value."""
        return 2 * count

    def encode(self, values: Floats, blocks: Bytes, words: Words) -> None:
        """See `Scheme`."""
        del words
        rounded = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        self._require_finite(rounded)
        blocks[...] = rounded.view(np.uint8)

    def decode(self, blocks: Bytes, values: Floats, words: Words) -> None:
        """See `Scheme`."""
        del words
        halves = np.ascontiguousarray(blocks).view(np.uint16)
        self._require_finite(halves)
        bits = values.view(np.uint32) if values.dtype == np.float32 else np.empty(values.shape, np.uint32)
        np.copyto(bits, halves)
        np.left_shift(bits, 16, out=bits)
        if values.dtype != np.float32:
            np.copyto(values, bits.view(np.float32))

    def _require_finite(self, halves: np.ndarray[tuple[int, ...], np.dtype[np.uint16]]) -> None:
        # The largest bfloat16 that is finite in the dtype: 65280 for float16.
        largest = 0x477F if self.dtype == torch.float16 else 0x7F7F
        if int((halves & 0x7FFF).max()) > largest:
            raise EncodingError(f"expected values that are finite as bfloat16 and {self.dtype}, got others")
