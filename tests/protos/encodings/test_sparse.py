"""topk and randk: which values are sent."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.encodings import EncodingError, EncodingSpec, decode, encode, encoding_key
from tests.protos.encodings.cases import DTYPES, KEY, SPECS, noise, one, round_trip

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
fractions = st.floats(1e-4, 1.0)


@each_dtype
@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.integers(-4, 4), min_size=1, max_size=200), fraction=fractions)
def test_topk_sends_the_largest_and_of_equal_ones_the_first(
    dtype: torch.dtype, values: list[int], fraction: float
) -> None:
    """The same choice as by sorting; kept values have no error, and all others are 0."""
    kept = math.ceil(fraction * len(values))
    chosen = set(sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[:kept])
    expected = [value if i in chosen else 0 for i, value in enumerate(values)]
    decoded = round_trip(torch.tensor(values, dtype=dtype), EncodingSpec("topk", fraction))
    assert decoded.tolist() == expected


@each_dtype
@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 9000), fraction=fractions)
def test_randk_sends_its_share_of_each_block(dtype: torch.dtype, count: int, fraction: float) -> None:
    """k values of each block are unchanged, all others are 0."""
    values = noise(count, dtype=dtype)
    values[values == 0] = 1
    decoded = round_trip(values, EncodingSpec("randk", fraction))
    for part, came in zip(values.split(4096), decoded.split(4096), strict=True):
        assert int(came.count_nonzero()) == math.ceil(fraction * len(part))
        assert torch.equal(came, torch.where(came == 0, 0, part))


def test_randk_draws_all_positions_alike() -> None:
    """Counts over 64 keys x 25 blocks: chi-squared, 4095 degrees of freedom, within 6.5 standard deviations.

    For a chi-squared variable of n degrees of freedom, P(X > n + 2 sqrt(n t) + 2 t) <= exp(-t) (Laurent and Massart,
    2000): with t = 27.7 the bound is n + 729, and the probability 1e-12. Draws without replacement vary less.
    """
    values = torch.ones(25 * 4096)
    spec = EncodingSpec("randk", 0.1)
    counts = sum(round_trip(values, spec, encoding_key(seed)).view(25, 4096).sum(0) for seed in range(64))
    assert isinstance(counts, torch.Tensor)
    expected = 64 * 25 * 410 / 4096
    assert float(counts.sum()) == 64 * 25 * 410
    assert float(((counts - expected) ** 2 / expected).sum()) <= 4095 + 729


@pytest.mark.parametrize("positions", [(3, 3), (4, 3), (0, 20), (65535, 65535)])
def test_positions_that_do_not_rise_or_are_too_large_are_refused(positions: tuple[int, int]) -> None:
    """A block of 20 values with two positions."""
    values = noise(20)
    encoded = one(values, SPECS["topk"])
    buffer = bytearray(encode({"weight": values}, encoded, KEY))
    buffer[:4] = struct.pack("<2H", *positions)
    with pytest.raises(EncodingError, match="expected rising positions below 20"):
        decode(buffer, encoded, KEY)


@pytest.mark.parametrize("name", ["topk", "randk"])
@each_dtype
def test_sent_values_must_be_finite(name: str, dtype: torch.dtype) -> None:
    """The values in the bytes have the dtype of the tensor, and could be NaN."""
    values = noise(20, dtype=dtype)
    encoded = one(values, SPECS[name])
    buffer = bytearray(encode({"weight": values}, encoded, KEY))
    buffer[-2:] = b"\xff\xff"
    with pytest.raises(EncodingError, match="expected values that are finite"):
        decode(buffer, encoded, KEY)
