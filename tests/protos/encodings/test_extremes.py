"""Every encoding with values at the ends of a dtype's range, and with damaged or wrong bytes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.encodings import EncodedLayout, EncodingError, EncodingSpec, decode, decode_range, encode
from protos.layout import Layout, LayoutError
from tests.marks import slow_except
from tests.protos.encodings.cases import (
    DTYPES,
    ENCODED,
    KEY,
    SPECS,
    encoded_layout,
    mixed,
    noise,
    one,
    round_trip,
)

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
every_encoded = pytest.mark.parametrize("spec", ENCODED.values(), ids=ENCODED)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
one_dtype = pytest.mark.parametrize("dtype", slow_except(DTYPES, torch.float32), ids=str)
"""For laws that need many decoded buffers."""


@every_spec
@every_dtype
def test_zeros_stay_zeros(spec: EncodingSpec, dtype: torch.dtype) -> None:
    """Zeros of any shape decode to zeros, from bytes that are zero but for positions."""
    for shape in ((), (1,), (2,), (3,), (255,), (257,), (4095,), (4096,), (4097,), (2, 0), (140_001,)):
        zeros = torch.zeros(shape, dtype=dtype)
        assert torch.equal(round_trip(zeros, spec), zeros), shape


@every_spec
@every_dtype
def test_denormal_values(spec: EncodingSpec, dtype: torch.dtype) -> None:
    """The smallest numbers of a dtype decode to numbers of their order, not to NaN or infinity."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    values = (noise(5000, dtype=torch.float64) * 40 * smallest).to(dtype)
    decoded = round_trip(values, spec)
    assert decoded.isfinite().all()
    assert decoded.double().abs().max() <= 8 * values.double().abs().max()


@every_spec
@every_dtype
def test_huge_values(spec: EncodingSpec, dtype: torch.dtype) -> None:
    """The largest numbers of a dtype are decoded to finite ones. bf16 refuses those that it would round to infinity."""
    if spec.name.startswith("eden"):
        return  # the next test
    largest = torch.finfo(dtype).max
    values = (torch.tensor([1.0, -1.0, 0.25, 0.999], dtype=torch.float64).repeat(1100) * largest).to(dtype)
    if spec.name == "bf16" and dtype != torch.bfloat16:
        with pytest.raises(EncodingError, match="tensor 'weight': expected values that are finite"):
            round_trip(values, spec)
    else:
        assert round_trip(values, spec).isfinite().all()


@pytest.mark.parametrize("name", ["eden4", "eden2", "eden1"])
@every_dtype
def test_huge_values_that_eden_would_decode_to_infinity_are_refused(name: str, dtype: torch.dtype) -> None:
    """The error of EDEN is spread over a block, so that values near the largest may exceed it."""
    largest = torch.finfo(dtype).max
    values = (noise(4096, dtype=torch.float64).clamp(-1, 1) * largest).to(dtype)
    with pytest.raises(EncodingError, match="tensor 'weight': expected values that are finite"):
        round_trip(values, SPECS[name])
    assert round_trip(values / 8, SPECS[name]).isfinite().all()


@every_encoded
@every_dtype
def test_values_that_are_not_finite_are_refused(spec: EncodingSpec, dtype: torch.dtype) -> None:
    """The message names the tensor."""
    for bad, position in product((float("nan"), float("inf"), -float("inf")), (0, 300, 4999)):
        values = noise(5000, dtype=dtype)
        values[position] = bad
        with pytest.raises(EncodingError, match="tensor 'weight': expected values that are finite"):
            encode({"weight": values}, one(values, spec), KEY)


@every_spec
@pytest.mark.parametrize("change", [-1, 1])
def test_buffers_of_another_size_are_refused(spec: EncodingSpec, change: int) -> None:
    """A buffer that is too short or too long is refused before it is decoded."""
    tensors = mixed()
    encoded = encoded_layout(tensors, spec)
    with pytest.raises(LayoutError, match=f"expected a buffer of {encoded.size_bytes} bytes"):
        decode(bytes(encoded.size_bytes + change), encoded, KEY)


@every_encoded
def test_short_reads_are_refused(spec: EncodingSpec) -> None:
    """A file that ends too early gives an error, not values."""
    encoded = one(noise(10), spec)
    with pytest.raises(EncodingError, match="bytes at offset 0, got "):
        decode_range(lambda _offset, nbytes: bytes(nbytes - 1), encoded, 0, 0, 10, KEY)


@every_encoded
@one_dtype
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_damaged_bytes_give_an_error_or_finite_values(
    spec: EncodingSpec, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Arbitrary bytes never give NaN or infinity, and never any exception but EncodingError."""
    values = noise(4500, dtype=dtype)
    encoded = one(values, spec)
    buffer = bytearray(encode({"weight": values}, encoded, KEY))
    patch = data.draw(st.binary(min_size=1, max_size=40))
    at = data.draw(st.integers(0, len(buffer) - len(patch)))
    buffer[at : at + len(patch)] = patch
    try:
        finite = bool(decode(buffer, encoded, KEY)["weight"].isfinite().all())
    except EncodingError as error:
        finite = "tensor 'weight': expected" in str(error)
    assert finite


@every_encoded
@one_dtype
def test_every_bit_counts(spec: EncodingSpec, dtype: torch.dtype) -> None:
    """A flipped bit gives an error or other values: no two byte strings of an encoding decode to the same values.

    Exceptions are values that the dtype rounds to the same, and -0, which compares equal to 0.
    """
    values = noise(75, dtype=dtype)
    encoded = one(values, spec)
    buffer = encode({"weight": values}, encoded, KEY)
    before = decode(buffer, encoded, KEY)["weight"].double()
    silent = 0
    for bit in range(8 * len(buffer)):
        damaged = bytearray(buffer)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            silent += torch.equal(decode(damaged, encoded, KEY)["weight"].double(), before)
        except EncodingError:
            continue
    rounded_away = {torch.float16: 14, torch.bfloat16: 17}.get(dtype, 0)
    assert silent <= rounded_away


def test_a_large_claim_costs_no_memory() -> None:
    """Sizes follow from shapes: a manifest of an exabyte is compared without any allocation."""
    encoded = EncodedLayout.of(Layout.of({"weight": torch.empty(4, 4)}, ["weight"]), SPECS["int8"])
    manifest = encoded.to_manifest()
    manifest.tensors[0].shape[:] = [2**40, 2**20]
    manifest.size_bytes = 2**60
    assert encoded.difference_from(manifest, 2**30) == f"expected at most {2**30} bytes, got size_bytes {2**60}"
    assert "expected shape [4, 4], got [1099511627776, 1048576]" in str(encoded.difference_from(manifest, 2**62))
