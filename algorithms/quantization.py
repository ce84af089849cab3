"""Updates as whole numbers of a few bits, whose sum is exact in any order: for sums under masks.

    y = R (w min(1, C / |x|) x)        clipped to C, weighted with w <= 1, rotated
    q = floor(y / g + u)               u uniform in [0, 1), for each value by itself: E q = y / g

The rotation R spreads every vector, so its values are within kappa C / sqrt(P), but for a chance of some 2 exp(-kappa^2
/ 2) each (`algorithms/hadamard.py` has P). g divides this range into 2^(b - 1) - 1 steps on each side of 0. The mean of
updates is R^-1 (g sum_i q_i) / sum_i w_i. The error of each y has a standard deviation of at most g / 2, and the mean 0
where nothing is cut off. The sum of n numbers of b bits is exact modulo 2^m for m >= b + log2 n.

Source of clip, rotation and rounding before a sum modulo a number: Kairouz, Liu, Steinke 2021, "The Distributed
Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from algorithms.base import Tensors
from algorithms.hadamard import power_below, rotate, rotate_back
from algorithms.privacy.random_bits import RandomBytes

Numbers = npt.NDArray[Any]
"""[values], whole numbers."""

FEWEST_BITS, MOST_BITS = 2, 24
KAPPA = 6.0
_CHUNK = 2**16
_ROUNDING_BITS = 16
"""Bits of u. The expected value of a number is right to half a step of u."""


@dataclass(frozen=True)
class Quantizer:
    """Updates of one layout as whole numbers."""

    clip: float
    """C, the largest L2 norm of an update; over 0."""
    bits: int
    """b, from FEWEST_BITS to MOST_BITS."""
    shapes: Mapping[str, tuple[int, ...]]
    """The tensors of an update, in order."""
    dtype: torch.dtype = torch.float32
    """float32 or float64, in which values are rotated."""
    kappa: float = KAPPA
    """The range of a rotated value, in its standard deviation; over 0."""

    def __post_init__(self) -> None:
        if not 0.0 < self.clip < math.inf or not 0.0 < self.kappa < math.inf:
            raise ValueError(f"expected a clip and a kappa over 0, got {self.clip} and {self.kappa}")
        if not FEWEST_BITS <= self.bits <= MOST_BITS:
            raise ValueError(f"bits: expected {FEWEST_BITS} to {MOST_BITS}, got {self.bits}")
        if not self.values:
            raise ValueError("expected an update with at least one value, got none")

    @staticmethod
    def like(tensors: Tensors, clip: float, bits: int) -> Quantizer:
        """The quantizer of updates with the layout of these tensors."""
        wide = any(tensor.dtype == torch.float64 for tensor in tensors.values())
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return Quantizer(clip, bits, shapes, torch.float64 if wide else torch.float32)

    @property
    def values(self) -> int:
        """d, the numbers of an update."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes.values()]

    @property
    def largest(self) -> int:
        """The largest number; the smallest is its negative."""
        return (1 << (self.bits - 1)) - 1

    @property
    def step(self) -> float:
        """g."""
        return self.clip * min(1.0, self.kappa / math.sqrt(power_below(self.values))) / self.largest

    def quantize(self, update: Tensors, weight: float, rotation: RandomBytes, rounding: RandomBytes) -> Numbers:
        """The numbers of an update, int32.

        Args:
            update: tensors with the names and shapes of `shapes`, on any device.
            weight: w, over 0 and at most 1.
            rotation: a stream that is the same for all updates of a sum.
            rounding: a stream of this update alone.

        Raises:
            ValueError: another layout, a weight out of range, or a norm that is not finite.
        """
        if not 0.0 < weight <= 1.0:
            raise ValueError(f"expected a weight over 0 and at most 1, got {weight}")
        flat = self._flat(update)
        norm = _norm(flat)
        if not math.isfinite(norm):
            raise ValueError(f"expected an update with a finite norm, got {norm}")
        factor = weight * min(1.0, self.clip / norm) / self.step if norm else 0.0
        rotate(flat, rotation)
        numbers = np.empty(len(flat), np.int32)
        for at, start in enumerate(range(0, len(flat), _CHUNK)):
            scaled = flat[start : start + _CHUNK].astype(np.float64)
            scaled *= factor
            np.clip(scaled, -self.largest, self.largest, out=scaled)
            scaled += _uniforms(rounding, at, len(scaled))
            numbers[start : start + _CHUNK] = np.floor(scaled, out=scaled)
        return numbers

    def mean(self, sums: Numbers, weight: float, rotation: RandomBytes) -> Tensors:
        """The weighted mean of the updates with these sums of numbers.

        Args:
            sums: signed, [values].
            weight: the sum of the weights, over 0.
            rotation: that of `quantize`.

        Returns:
            Tensors on the CPU, in `dtype`.
        """
        if sums.shape != (self.values,) or not weight > 0.0:
            raise ValueError(f"expected {self.values} sums and a weight over 0, got {sums.shape} and {weight}")
        flat = sums.astype(_numpy_type(self.dtype))
        flat *= self.step / weight
        rotate_back(flat, rotation)
        pieces = torch.from_numpy(flat).split(self._sizes)
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    def _flat(self, update: Tensors) -> npt.NDArray[Any]:
        shapes = {name: tuple(tensor.shape) for name, tensor in update.items()}
        if shapes != dict(self.shapes):
            raise ValueError(f"expected tensors of the shapes {dict(self.shapes)}, got {shapes}")
        flat = torch.empty(self.values, dtype=self.dtype)
        places = flat.split(self._sizes)
        for name, place in zip(self.shapes, places, strict=True):
            place.copy_(update[name].detach().flatten())
        return flat.numpy()


def _norm(flat: npt.NDArray[Any]) -> float:
    """The L2 norm, added up in float64 chunk by chunk."""
    squares = 0.0
    for start in range(0, len(flat), _CHUNK):
        wide = flat[start : start + _CHUNK].astype(np.float64)
        squares += float(np.square(wide, out=wide).sum())
    return math.sqrt(squares)


def _uniforms(random: RandomBytes, step: int, count: int) -> npt.NDArray[np.float64]:
    """Numbers in (0, 1): the middles of 2^_ROUNDING_BITS equal parts."""
    raw = np.frombuffer(random("rounding", step, count * _ROUNDING_BITS // 8), "<u2")
    made: npt.NDArray[np.float64] = (raw + 0.5) * 2.0**-_ROUNDING_BITS
    return made


def _numpy_type(dtype: torch.dtype) -> type[np.floating[Any]]:
    return np.float64 if dtype == torch.float64 else np.float32
