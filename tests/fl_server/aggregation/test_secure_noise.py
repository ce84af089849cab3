"""The noise of a masked sum: as long as z times the longest numbers of a client, once for each sum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from algorithms.quantization import Quantizer
from fl_common.privacy.secret_stream import SecretStream
from fl_server.aggregation.secure_aggregation import SumNoise

VALUES = 3000
KEY = bytes(range(32))


def quantizer(bits: int) -> Quantizer:
    """Of one tensor."""
    return Quantizer.like({"w": torch.empty(VALUES, device="meta")}, 0.5, bits)


@pytest.mark.parametrize("bits", [2, 4, 16])
@pytest.mark.parametrize("size", [0.01, 0.5, 40.0])
def test_no_client_has_longer_numbers(bits: int, size: float) -> None:
    """Whatever its update: of any norm, with one large value, or with all of the same size."""
    of = quantizer(bits)
    one, random = torch.zeros(VALUES), torch.randn(VALUES, generator=torch.Generator().manual_seed(bits))
    one[7] = 1.0
    for number, direction in enumerate((one, torch.ones(VALUES), random)):
        update = {"w": direction * (size / float(direction.norm()))}
        numbers = of.quantize(update, 1.0, SecretStream(KEY), SecretStream(bytes([number] * 32)))
        assert np.linalg.norm(numbers.astype(np.float64)) <= longest(of)


def longest(of: Quantizer) -> float:
    """C / g + sqrt(d), with the room for rounding."""
    return of.clip / of.step * (1 + 2.0**-20) + math.sqrt(VALUES)


def test_the_noise_has_z_times_that_deviation() -> None:
    """Its mean is 0 and its deviation is within three errors of estimation of what it should be."""
    of, zeros = quantizer(16), np.zeros(VALUES, np.int64)
    noise = SumNoise(0.7, 5, KEY).added_to(zeros, of).astype(np.float64)
    wanted = 0.7 * longest(of)
    assert abs(noise.mean()) <= 4 * wanted / math.sqrt(VALUES)
    assert noise.std() == pytest.approx(wanted, rel=3 / math.sqrt(2 * VALUES))


def test_a_sum_has_one_noise() -> None:
    """The same after a restart; another one for another sum, and for another key of the round."""
    of, zeros = quantizer(16), np.zeros(VALUES, np.int64)
    other = zeros.copy()
    other[0] = 1
    first, again = (SumNoise(1.0, 5, KEY).added_to(zeros, of) for _ in range(2))
    assert (first == again).all()
    assert (first != SumNoise(1.0, 5, KEY).added_to(other, of) - other).mean() > 0.99
    assert (first != SumNoise(1.0, 5, bytes(32)).added_to(zeros, of)).mean() > 0.99
    assert not zeros.any()
