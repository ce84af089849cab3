"""A random rotation of a vector of any length: signs and Hadamard matrices.

H_P is the Hadamard matrix of order P = 2^p: H_ij is -1 to the number of bits that i and j share. D x has the signs of
random bits. A vector of d values, with P the largest power of two that is at most d, is rotated as

    x[: P] <- H_P D_1 x[: P] / sqrt(P),        x[d - P :] <- H_P D_2 x[d - P :] / sqrt(P)

so that every value of the result mixes at least P values, no value is added for padding, and the length stays. Whatever
the vector, a value of the result has the size of |x| / sqrt(P) times a number that is nearly normal (Suresh, Yu, Kumar,
McMahan 2017, "Distributed Mean Estimation with Limited Communication").
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from algorithms.privacy.random_bits import RandomBytes

Values = npt.NDArray[Any]
"""[d], float32 or float64."""

_ROW = 4096
_ROWS = 8
"""Rows that are transformed at a time: with the matrices between the two steps they fit a processor's cache."""
_LOW = 64
"""The largest order of a matrix that is multiplied: numpy multiplies such small ones in the calling thread, whatever
precision torch is set to."""


def power_below(count: int) -> int:
    """The largest power of two that is at most `count`, which is over 0."""
    return 1 << (count.bit_length() - 1)


def rotate(values: Values, random: RandomBytes) -> None:
    """Rotate a vector in its memory. random: the same for all vectors of a sum."""
    power = power_below(len(values))
    for step, window in enumerate((values[:power], values[len(values) - power :])):
        _flip(window, random, step)
        _transform(window)


def rotate_back(values: Values, random: RandomBytes) -> None:
    """Undo `rotate` with the same random bytes."""
    power = power_below(len(values))
    for step, window in ((1, values[len(values) - power :]), (0, values[:power])):
        _transform(window)
        _flip(window, random, step)


def _flip(window: Values, random: RandomBytes, step: int) -> None:
    """Multiply each value by -1 where its random bit is 1."""
    bits = np.frombuffer(random("signs", step, -(-len(window) // 8)), np.uint8)
    for start in range(0, len(window), 8 * _ROW):
        piece = window[start : start + 8 * _ROW]
        signs = np.unpackbits(bits[start // 8 : start // 8 + _ROW], count=len(piece), bitorder="little")
        raw = piece.view(f"u{piece.itemsize}")
        raw ^= signs.astype(raw.dtype) << np.array(8 * piece.itemsize - 1, raw.dtype)


def _transform(window: Values) -> None:
    """x <- H x / sqrt(P) for a contiguous vector whose length is a power of two.

    The matrix of order a b is that of b within rows of b values, and that of a among the rows.
    """
    _within_rows(window.reshape(-1, min(len(window), _ROW)))
    mixed = _ROW
    while mixed < len(window):
        rows = min(_LOW, len(window) // mixed)
        for grid in window.reshape(-1, rows, mixed):
            _among_rows(grid)
        mixed *= rows
    window *= 1.0 / math.sqrt(len(window))


def _among_rows(grid: Values) -> None:
    """x <- H x for each column of [rows, values], some columns at a time where they are."""
    matrix, made = _hadamard(len(grid), grid.dtype.char), np.empty((len(grid), _LOW), grid.dtype)
    for start in range(0, grid.shape[1], _LOW):
        columns = grid[:, start : start + _LOW]
        columns[:] = np.matmul(matrix, columns, out=made)


def _within_rows(matrix: Values) -> None:
    """x <- H x for each contiguous row of at most _ROW values, some rows at a time."""
    width = matrix.shape[1]
    low = min(width, _LOW)
    left, right = _hadamard(width // low, matrix.dtype.char), _hadamard(low, matrix.dtype.char)
    squares = matrix.reshape(len(matrix), -1, low)
    made = np.empty((min(len(squares), _ROWS), *squares.shape[1:]), matrix.dtype)
    for start in range(0, len(squares), _ROWS):
        some = squares[start : start + _ROWS]
        np.matmul(left, np.matmul(some, right, out=made[: len(some)]), out=some)


@cache
def _hadamard(order: int, kind: str) -> Values:
    matrix = np.ones((1, 1), kind)
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix
