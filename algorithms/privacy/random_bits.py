"""Random numbers made of the bytes of a cryptographic stream: normal numbers, and draws of examples.

The caller has the stream. torch's generators are not used: their seeds are 64 bits, which others may know or guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

RandomBytes = Callable[[str, int, int], bytearray]
"""(purpose, step, number of bytes) -> bytes that nobody can predict. Equal arguments give equal bytes."""

_BITS = 53
"""Bits of a float64's fraction."""


def uniforms(random: RandomBytes, purpose: str, step: int, count: int) -> Tensor:
    """Numbers [count], float64, from 0 to below 1 in steps of 2^-53."""
    if not count:
        return torch.zeros(0, dtype=torch.float64)
    words = torch.frombuffer(random(purpose, step, 8 * count), dtype=torch.int64)
    # The shift of a signed number keeps its sign, which the mask removes.
    return ((words >> (64 - _BITS)) & ((1 << _BITS) - 1)).double() * 2.0**-_BITS


def normals(random: RandomBytes, purpose: str, step: int, count: int) -> Tensor:
    """Independent numbers [count] of the standard normal distribution, float64 (Box and Muller 1958).

    They are rounded to float64, so the largest has the size of 8.6. Attacks on the rounding of noise (Mironov 2012)
    need outputs of one number; sums of a chunk's gradients are rounded as coarsely themselves.
    """
    half = -(-count // 2)
    radius, angle = uniforms(random, purpose, step, 2 * half).split(half)
    radius = (1.0 - radius).log_().mul_(-2.0).sqrt_()  # 1 - u is never 0
    angle = angle * (2.0 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]


def poisson_draw(random: RandomBytes, step: int, examples: int, rate: float) -> Tensor:
    """Positions [drawn], int64, in order: each of so many examples is drawn by itself with the probability `rate`."""
    return (uniforms(random, "draw", step, examples) < rate).nonzero().flatten()
