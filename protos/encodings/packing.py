"""Fields of 1, 2, 4 or 8 bits in bytes: the first field of a byte has its lowest bits. Unused bits are 0."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from protos.encodings.scheme import Bytes, EncodingError, Floats


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` fields."""
    return -(-count * bits // 8)


def pack_bits(fields: Bytes, bits: int) -> Bytes:
    """[blocks, count] fields, of which the lowest bits count -> [blocks, bytes]."""
    per_byte = 8 // bits
    if missing := -fields.shape[1] % per_byte:
        fields = np.pad(fields, ((0, 0), (0, missing)))
    if per_byte == 1:
        return fields
    # One integer has the fields of one byte, the first in its lowest byte.
    wide = fields.view(f"<u{per_byte}")
    mask = 2**bits - 1
    packed = wide & mask
    for place in range(1, per_byte):
        packed |= (wide >> (8 - bits) * place) & (mask << bits * place)
    narrow: Bytes = packed.astype(np.uint8)
    return narrow


class Numbers:
    """The numbers that fields stand for, read for all fields of a byte at once."""

    def __init__(self, of_fields: npt.NDArray[Any]) -> None:
        """of_fields: [2^bits], the number of each field, as float32 or float64. The bits are 1, 2 or 4."""
        self._bits = len(of_fields).bit_length() - 1
        shifts = np.arange(0, 8, self._bits)
        self._bytes = np.ascontiguousarray(of_fields[(np.arange(256)[:, None] >> shifts) & (len(of_fields) - 1)])

    def read(self, packed: Bytes, count: int) -> Floats:
        """[blocks, bytes] -> [blocks, count] numbers. Raises EncodingError if an unused bit is set."""
        per_byte = 8 // self._bits
        if (used := count % per_byte) and (packed[:, -1] >> used * self._bits).any():
            raise EncodingError("expected unused bits of 0 in the last byte of a block, got others")
        numbers: Floats = _rows(self._bytes, packed)
        return numbers[:, :count]


def _rows(table: npt.NDArray[Any], index: Bytes) -> npt.NDArray[Any]:
    """[256, width] table, [blocks, bytes] -> [blocks, bytes * width]."""
    # numpy copies an item of one type much faster than a row of several items.
    width = table.itemsize * table.shape[1]
    items = table.view(_item(width))
    unpacked = np.take(items.reshape(256, -1), index, axis=0, mode="wrap")
    return unpacked.view(table.dtype).reshape(len(index), -1)


@cache
def _item(width: int) -> np.dtype[Any]:
    """The largest copied type that divides a row."""
    return np.dtype(np.complex128 if width % 16 == 0 else np.uint64)
