"""int8, int4, int2 and bf16: error bounds, and means without bias."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protos.encodings import EncodingError, decode, encode, encoding_key
from tests.protos.encodings.cases import DTYPES, INTEGERS, KEY, SPECS, noise, one, round_trip

each_integer = pytest.mark.parametrize("name", INTEGERS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

lists = st.lists(st.floats(-1.0, 1.0, width=16), min_size=1, max_size=600)
powers = st.integers(-140, 120)


def scaled(values: list[float], power: int, dtype: torch.dtype) -> Tensor:
    """Values of very different magnitude, at most those of the dtype."""
    limit = math.frexp(torch.finfo(dtype).max)[1] - 1
    return (torch.tensor(values, dtype=torch.float64) * 2.0 ** min(power, limit)).to(dtype)


def half_steps(values: Tensor) -> Tensor:
    """What rounding to the dtype may change: half of the distance of neighbours."""
    info = torch.finfo(values.dtype)
    return values.double().abs() * info.eps / 2 + info.smallest_normal * info.eps / 2


@each_integer
@each_dtype
@settings(max_examples=20, deadline=None)
@given(values=lists, power=powers, seed=st.integers(0, 2**63))
def test_integers_are_within_a_step(name: str, dtype: torch.dtype, values: list[float], power: int, seed: int) -> None:
    """|decoded - x| <= s (1 + 2^-16) for each value, and one rounding of s q to the dtype.

    s is at most max |x| / m (1 + 2^-22), or 2^-149 more for denormal scales (2^-1074 for float64).
    """
    x = scaled(values, power, dtype)
    decoded = round_trip(x, SPECS[name], encoding_key(seed)).double()
    tiny = 2.0**-1074 if dtype == torch.float64 else 2.0**-149
    for part, came in zip(x.double().split(256), decoded.split(256), strict=True):
        step = part.abs().max() / INTEGERS[name] * (1 + 2**-22) + tiny
        largest = torch.full_like(part, float(step) * INTEGERS[name])
        rounding = half_steps(largest.to(torch.float64).clamp(max=torch.finfo(dtype).max).to(dtype))
        assert ((came - part).abs() <= step * (1 + 2**-15) + rounding).all()


@each_integer
def test_the_mean_of_integers_has_no_bias(name: str) -> None:
    """Errors in units of s have a range of 1 for one x, so Hoeffding bounds their mean over n independent draws.

    P(|mean| > t) <= 2 exp(-2 n t^2). With n = 40 keys x 20 blocks x 255 values and t = 0.0085 that is below 1e-12 for
    each of the 5 fractions, less the 2^-16 that the rounding of r may add.
    """
    for fraction in (0.02, 0.3, 0.5, 0.77, 0.99):
        block = torch.full((20, 256), fraction / INTEGERS[name])
        block[:, 0] = 1.0
        encoded = one(block, SPECS[name])
        keys = (encoding_key(1, "update", exchange, "delta") for exchange in range(40))
        decoded = [decode(encode({"weight": block}, encoded, key), encoded, key)["weight"][:, 1:] for key in keys]
        errors = (torch.stack(decoded).double() - block[:, 1:].double()) * INTEGERS[name]
        assert errors.numel() == 40 * 20 * 255
        assert errors.abs().max() <= 1 + 1e-6
        assert abs(float(errors.mean())) <= 0.0085 + 2**-16


@each_integer
def test_levels_are_decoded_exactly(name: str) -> None:
    """Values that are levels have no error, whatever is drawn."""
    m = INTEGERS[name]
    levels = torch.arange(-m, m + 1).float() / 4
    assert torch.equal(round_trip(levels, SPECS[name]), levels)


@each_integer
@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (-1.0, "finite and not negative"),
        (-0.0, "finite and not negative"),
        (math.nan, "finite and not negative"),
        (math.inf, "finite and not negative"),
        (0.0, "expected zero bytes behind a scale of 0"),
    ],
)
def test_scales_that_no_encoder_writes_are_refused(name: str, scale: float, message: str) -> None:
    """Negative ones, minus zero, NaN, infinity; and zero before levels that are not."""
    encoded = one(noise(300), SPECS[name])
    buffer = bytearray(encode({"weight": noise(300)}, encoded, KEY))
    buffer[:4] = torch.tensor(scale).numpy().tobytes()
    with pytest.raises(EncodingError, match=message):
        decode(buffer, encoded, KEY)


@each_integer
@each_dtype
def test_scales_beyond_the_dtype_are_refused(name: str, dtype: torch.dtype) -> None:
    """s m must be finite in the dtype of the tensor."""
    values = noise(300, dtype=dtype)
    encoded = one(values, SPECS[name])
    buffer = bytearray(encode({"weight": values}, encoded, KEY))
    too_large = torch.tensor(torch.finfo(dtype).max, dtype=torch.float64) / INTEGERS[name] * 1.01
    if torch.isinf(too_large if dtype == torch.float64 else too_large.float()):
        return  # the scale's own type cannot have such a number: m = 1
    raw = (too_large if dtype == torch.float64 else too_large.float()).numpy().tobytes()
    buffer[: len(raw)] = raw
    with pytest.raises(EncodingError, match="expected scales whose levels are finite"):
        decode(buffer, encoded, KEY)


@each_integer
def test_the_lowest_integer_is_no_level(name: str) -> None:
    """-128, -8 and -2 have no opposite, and no encoder writes them."""
    encoded = one(torch.ones(8), SPECS[name])
    buffer = bytearray(encode({"weight": torch.ones(8)}, encoded, KEY))
    buffer[4] = {"int8": 0x80, "int4": 0x18, "int2": 0x12}[name]
    with pytest.raises(EncodingError, match=f"expected levels of {-INTEGERS[name]} and more"):
        decode(buffer, encoded, KEY)


@pytest.mark.parametrize(("name", "count"), [("int4", 3), ("int2", 5), ("int2", 6), ("int2", 7)])
def test_unused_bits_are_zero(name: str, count: int) -> None:
    """The last byte of a block has no other content."""
    encoded = one(torch.ones(count), SPECS[name])
    buffer = bytearray(encode({"weight": torch.ones(count)}, encoded, KEY))
    assert buffer[-1] >> (count * int(name[3:]) - 1) % 8 + 1 == 0
    buffer[-1] |= 0x40
    with pytest.raises(EncodingError, match="expected unused bits of 0"):
        decode(buffer, encoded, KEY)


@each_dtype
@settings(max_examples=20, deadline=None)
@given(values=lists, power=powers)
def test_bf16_is_rounded_to_the_nearest(dtype: torch.dtype, values: list[float], power: int) -> None:
    """|decoded - x| <= 2^-8 |x| + 2^-134 and one rounding to the dtype; torch's own conversion has the same bits."""
    x = scaled(values, power, dtype).clamp(-60000, 60000)
    decoded = round_trip(x, SPECS["bf16"])
    assert torch.equal(decoded, x.to(torch.bfloat16).to(dtype))
    error = (decoded.double() - x.double()).abs()
    assert (error <= x.double().abs() * 2**-8 + 2.0**-134 + 2 * half_steps(x)).all()


def test_ties_of_bf16_go_to_even() -> None:
    """1 + 2^-8 lies between 1 and 1 + 2^-7, and 1 + 3 2^-8 between 1 + 2^-7 and 1 + 2^-6."""
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    assert round_trip(values, SPECS["bf16"]).tolist() == [1.0, 1 + 2**-6]
