"""The codec: layouts, and tensors that come back bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protos.codec import Layout, LayoutError, pack, pieces_of, unpack
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
    """For any names, shapes and dtypes unpack reverses pack, in order."""
    layout = Layout.of(named)
    back = unpack(bytes(pack(named, layout)), layout)
    assert list(back) == list(named)
    assert all(same_bits(back[name], named[name]) for name in named)


@given(tensors)
def test_pieces_are_the_bytes_that_are_packed(named: dict[str, Tensor]) -> None:
    """Concatenated they are the packed bytes, with the zeros between tensors."""
    layout = Layout.of(named)
    assert b"".join(pieces_of(named, layout)) == pack(named, layout)


@given(tensors)
def test_a_layout_survives_its_manifest(named: dict[str, Tensor]) -> None:
    """A layout that is sent is the layout that arrives, trainable marks too."""
    layout = Layout.of(named, trainable=list(named)[::2])
    wire = layout.to_manifest().SerializeToString()
    assert Layout.from_manifest(tensor_pb2.Manifest.FromString(wire), layout.size_bytes) == layout


def test_the_bytes_are_little_endian_and_packed_in_order() -> None:
    """1 as int16 is 01 00; float32 1.0 is 00 00 80 3f, at the next multiple of 4, and the gap is zero."""
    named = {"n": torch.tensor(1, dtype=torch.int16), "x": torch.tensor([1.0])}
    assert pack(named, Layout.of(named)).hex(" ") == "01 00 00 00 00 00 80 3f"


def test_strides_do_not_reach_the_wire() -> None:
    """A transposed tensor is written in the order of its own indices."""
    x = torch.arange(6.0).view(2, 3)
    layout = Layout.of({"x": x.t()})
    assert pack({"x": x.t()}, layout) == pack({"x": x.t().contiguous()}, layout)


def test_parameters_that_require_grad_are_packed() -> None:
    """A model's own parameters can be packed as they are."""
    weight = torch.nn.Parameter(torch.ones(2))
    layout = Layout.of({"w": weight})
    assert torch.equal(unpack(pack({"w": weight}, layout), layout)["w"], torch.ones(2))


def test_unpack_copies_nothing() -> None:
    """Writes to a tensor change the buffer, and writes to the buffer change the tensor."""
    layout = Layout.of({"x": torch.zeros(2)})
    buffer = bytearray(layout.size_bytes)
    unpack(buffer, layout)["x"][1] = 1.0
    assert buffer.hex(" ") == "00 00 00 00 00 00 80 3f"


def test_views_keep_their_buffer_alive() -> None:
    """The caller may release the bytes: the views keep the buffer."""
    layout = Layout.of({"x": torch.zeros(1 << 16)})
    x = unpack(bytes(pack({"x": torch.ones(1 << 16)}, layout)), layout)["x"]
    others = [b"\xff" * layout.size_bytes for _ in range(8)]
    assert torch.equal(x, torch.ones(1 << 16))
    del others  # until here the views use freed memory


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_unpacked(kind: type) -> None:
    """Received bytes, a part of a larger buffer and a writable one do, without a warning."""
    layout = Layout.of({"x": torch.zeros(2)})
    assert torch.equal(unpack(kind(bytes(8)), layout)["x"], torch.zeros(2))


@pytest.mark.parametrize("size", [7, 9, 0])
def test_a_buffer_of_another_size_is_refused(size: int) -> None:
    """A short buffer would be read past its end."""
    with pytest.raises(LayoutError, match=f"expected a buffer of 8 bytes, got {size}"):
        unpack(bytes(size), Layout.of({"x": torch.zeros(2)}))


def test_a_bool_is_0_or_1() -> None:
    """torch takes the byte 2 for a bool that is neither true nor false."""
    with pytest.raises(LayoutError, match="tensor 'mask': expected bytes 0 and 1 for bool, got 2"):
        unpack(b"\x01\x02", Layout.of({"mask": torch.zeros(2, dtype=torch.bool)}))


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({}, r"tensor 'x': expected shape \(2,\) float32, but it is missing"),
        ({"x": torch.zeros(1)}, r"expected shape \(2,\) float32, got \(1,\) float32"),
        ({"x": torch.zeros(2).double()}, r"got \(2,\) float64"),
        ({"x": torch.zeros(2), "y": torch.zeros(1)}, "tensor 'y': not expected"),
    ],
    ids=["missing", "broadcastable", "dtype", "extra"],
)
def test_only_the_tensors_of_the_layout_are_packed(named: dict[str, Tensor], words: str) -> None:
    """A shape that could be broadcast and a dtype that could be cast are errors all the same."""
    with pytest.raises(LayoutError, match=words):
        pack(named, Layout.of({"x": torch.zeros(2)}))


def test_a_big_endian_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers would have reversed bytes."""
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(RuntimeError, match="expected a little-endian machine"):
        unpack(b"", Layout.of({}))


def test_pieces_are_not_copied_and_keep_their_tensor_alive() -> None:
    """The piece of a contiguous tensor is its memory; that of a transposed one is laid out first."""
    tensor = torch.zeros(2, 3)
    (piece,) = pieces_of({"w": tensor}, layout := Layout.of({"w": tensor}))
    tensor += 1
    expected = pack({"w": tensor}, layout)
    del tensor
    assert bytes(piece) == bytes(expected)


def test_pieces_of_other_tensors_are_refused() -> None:
    """The same tensors are refused by pack."""
    with pytest.raises(LayoutError, match="missing"):
        list(pieces_of({}, Layout.of({"w": torch.zeros(1)})))
