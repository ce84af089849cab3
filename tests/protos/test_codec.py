"""The codec: layouts, and tensors that come back bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protos.codec import Layout, LayoutError, pack, unpack
from protos.fl.v1 import tensor_pb2

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor of random bits, seen as the dtype: NaNs and infinities too."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and bytes; a NaN equals itself here."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)
    )


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.dictionaries(
    st.text(min_size=1, max_size=8), st.builds(make, shapes, st.sampled_from(DTYPES), st.integers(0, 99)), max_size=6
)


@given(tensors)
def test_tensors_come_back_bit_for_bit(named: dict[str, Tensor]) -> None:
    """Whatever the names, shapes and dtypes: unpack undoes pack, in order."""
    layout = Layout.of(named)
    back = unpack(bytes(pack(named, layout)), layout)
    assert list(back) == list(named)
    assert all(same_bits(back[name], named[name]) for name in named)


@given(tensors)
def test_a_layout_survives_its_manifest(named: dict[str, Tensor]) -> None:
    """A layout that is sent is the layout that arrives, trainable marks too."""
    layout = Layout.of(named, trainable=list(named)[::2])
    wire = layout.to_manifest().SerializeToString()
    assert Layout.from_manifest(tensor_pb2.Manifest.FromString(wire), layout.size_bytes) == layout
