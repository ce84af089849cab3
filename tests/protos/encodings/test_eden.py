"""EDEN: its levels, its error and its mean."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from protos.encodings import EncodingError, decode, encode, encoding_key
from protos.encodings.eden import LEVELS
from tests.protos.encodings.cases import DTYPES, EDEN, KEY, SPECS, noise, one, round_trip

each_eden = pytest.mark.parametrize("name", EDEN)


def heavy_tailed(count: int, seed: int) -> Tensor:
    """Student's t with 3 degrees of freedom: its fourth moment is infinite."""
    draws = noise(4, count, seed=seed, dtype=torch.float64)
    return (draws[0] / (draws[1:].square().mean(0)).sqrt()).float()


def mass(low: float, high: float) -> tuple[float, float]:
    """Probability and first moment of a normal variable between two numbers."""
    probability = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
    return probability, (math.exp(-low * low / 2) - math.exp(-high * high / 2)) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("bits", LEVELS)
def test_levels_are_those_of_lloyd_and_max(bits: int) -> None:
    """Each level is the mean of the normal variable between the midpoints to its neighbours (Max, 1960).

    Levels are multiples of 2^-10, and midpoints move with them, so they differ from these means by less than 2^-9.
    """
    levels = [level / 1024 for level in LEVELS[bits]]
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), 40.0]
    for level, (low, high) in zip(levels, pairwise(edges), strict=True):
        probability, moment = mass(low, high)
        assert abs(level - moment / probability) < 2**-9
    assert max(LEVELS[bits]) * 4096 < 2**24, "sums of levels must be exact in float32"


@each_eden
@pytest.mark.parametrize("values", [noise(4096), heavy_tailed(4096, 1)], ids=["normal", "heavy-tailed"])
def test_the_error_is_that_of_the_levels(name: str, values: Tensor) -> None:
    """|decoded - x| = |x| sqrt(d / (1 - d)) within 4 %, for the distortion d of the levels.

    The squared error of a block is a mean over 4096 rotated values, so its standard deviation is about 2 % for eden4
    and less for the others. Keys and values are fixed.
    """
    expected = math.sqrt(EDEN[name] / (1 - EDEN[name]))
    for seed in range(12):
        error = round_trip(values, SPECS[name], encoding_key(seed)) - values
        assert float(error.norm() / values.norm()) == pytest.approx(expected, rel=0.04)


@each_eden
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 100, 4096])
def test_the_error_is_across_the_values(name: str, dtype: torch.dtype, count: int) -> None:
    """<decoded, x> = |x|^2, and |error| <= |x| c_max sqrt(N) / c_min, for blocks of any values.

    The bound: tan(c, y) <= |c| |y| / <c, y>, with |c| <= c_max sqrt(N), and <c, y> >= c_min |y|_1 >= c_min |y|.
    """
    x = heavy_tailed(count, seed=count).to(dtype)
    decoded = round_trip(x, SPECS[name]).double()
    x = x.double()
    rounding = max(torch.finfo(dtype).eps, 1e-6)
    assert float(decoded @ x / (x @ x)) == pytest.approx(1, abs=4 * rounding * float(decoded.norm() / x.norm()))
    levels = LEVELS[int(name[4:])]
    assert (decoded - x).norm() <= x.norm() * levels[-1] / levels[0] * math.sqrt(2 * count)


@each_eden
@pytest.mark.parametrize(
    ("values", "bias"), [(noise(4096), 0.0), (heavy_tailed(4096, 7), 0.05)], ids=["normal", "heavy-tailed"]
)
def test_the_mean_over_keys_has_little_bias(name: str, values: Tensor, bias: float) -> None:
    """The bias is 0 for normal values, and below 5 % of the error for heavy-tailed ones.

    K |mean error|^2 / mean |error|^2 is 1 for independent errors with mean 0, and over K b^2 with a bias b.

    As the mean of 4096 squared normal variables it exceeds 1.17 with a probability below exp(-2048 (0.17 - ln 1.17)),
    3e-12. With K = 200 keys, a bias of 3 % of the error would give 1.18.
    """
    keys = [encoding_key(seed) for seed in range(200)]
    errors = torch.stack([round_trip(values, SPECS[name], key).double() - values.double() for key in keys])
    ratio = len(keys) * errors.mean(0).square().sum() / errors.square().sum(1).mean()
    assert 0.83 <= float(ratio) <= 1.17 + len(keys) * bias**2


@each_eden
def test_a_single_value_is_exact(name: str) -> None:
    """One value that is not 0 is rotated to equal magnitudes, which have one level: |x|^2 = <decoded, x> fixes it."""
    values = torch.zeros(4096)
    values[1234] = -0.75
    decoded = round_trip(values, SPECS[name])
    assert torch.allclose(decoded, values, rtol=1e-6, atol=0)


@each_eden
def test_blocks_of_two_values_may_have_a_bias(name: str) -> None:
    """The limit that the documentation states: with two values in a block, eden1 keeps the larger one only."""
    values = torch.zeros(4096)
    values[7], values[1234] = 1.0, 0.25
    decoded = [round_trip(values, SPECS[name], encoding_key(seed)) for seed in range(20)]
    mean = torch.stack(decoded).mean(0)
    assert mean.count_nonzero() <= 2
    if name == "eden1":
        assert [float(mean[7]), float(mean[1234])] == [pytest.approx(1 + 0.25**2), 0]


@each_eden
def test_unused_bits_are_zero(name: str) -> None:
    """A block of one value has one index, whose byte has no other content."""
    encoded = one(torch.ones(1), SPECS[name])
    buffer = bytearray(encode({"weight": torch.ones(1)}, encoded, KEY))
    buffer[-1] |= 0x80
    with pytest.raises(EncodingError, match="expected unused bits of 0"):
        decode(buffer, encoded, KEY)


@each_eden
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scales_are_refused_only_if_values_are_infinite(name: str, dtype: torch.dtype) -> None:
    """A scale of the dtype's maximum makes some values infinite; one of a hundredth of it does not."""
    values = noise(4096, dtype=dtype)
    encoded = one(values, SPECS[name])
    buffer = bytearray(encode({"weight": values}, encoded, KEY))
    for share, refused in ((1.0, True), (0.01, False)):
        scale = torch.tensor(torch.finfo(dtype).max * share, dtype=torch.float64)
        raw = (scale if dtype == torch.float64 else scale.float()).numpy().tobytes()
        buffer[: len(raw)] = raw
        if refused:
            with pytest.raises(EncodingError, match="expected values that are finite"):
                decode(buffer, encoded, KEY)
        else:
            assert decode(buffer, encoded, KEY)["weight"].isfinite().all()
