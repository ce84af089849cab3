"""Tensors that lie as they are sent are sent as they lie."""

from __future__ import annotations

import pytest
import torch

from fl_server.bundles import blank, groups, laid_out, packed
from protos.codec import Layout, LayoutError, pack

TENSORS = {"a": torch.arange(3, dtype=torch.int8), "b": torch.tensor([1.5, 2.5]), "none": torch.zeros(0, 2)}
LAYOUT = Layout.of(TENSORS, trainable=["b"])
"""Three bytes, one between, eight bytes."""


def test_what_is_laid_out_is_not_copied():
    """A value that is written afterwards shows in the bytes: they are the tensor's own."""
    tensors = laid_out(TENSORS, LAYOUT)
    memory = packed(tensors, LAYOUT)
    assert bytes(memory) == pack(TENSORS, LAYOUT)
    tensors["b"][1] = 7.0
    assert bytes(memory) == pack({**TENSORS, "b": torch.tensor([1.5, 7.0])}, LAYOUT)


@pytest.mark.parametrize("spoil", ["apart", "reversed", "gap"])
def test_anything_else_is_packed(spoil):
    """Tensors of their own, places exchanged, and a gap that is not zero: the bytes are right all the same."""
    tensors = laid_out(TENSORS, LAYOUT)
    if spoil == "apart":
        tensors = {**tensors, "b": tensors["b"].clone()}
    if spoil == "reversed":
        tensors["a"] = tensors["a"].flip(0)
    if spoil == "gap":
        torch.empty(0, dtype=torch.uint8).set_(tensors["a"].untyped_storage())[3] = 9
    assert bytes(packed(tensors, LAYOUT)) == pack(tensors, LAYOUT)


def test_bytes_for_sending_are_not_written():
    """Whoever sends them cannot change the model."""
    with pytest.raises(TypeError):
        packed(laid_out(TENSORS, LAYOUT), LAYOUT)[0] = 1


def test_another_layout_is_refused():
    """Also when the tensors lie in one memory."""
    with pytest.raises(LayoutError, match="'c'"):
        packed(blank(LAYOUT), Layout.of({"c": torch.zeros(3)}))


def test_a_blank_one_is_zero():
    """Every tensor of the layout, on one memory."""
    tensors = blank(LAYOUT)
    assert list(tensors) == ["a", "b", "none"]
    assert not any(bool(tensor.any()) for tensor in tensors.values())
    assert tensors["a"].untyped_storage().data_ptr() == tensors["b"].untyped_storage().data_ptr()


def test_groups_fill_up_and_a_large_tensor_is_alone():
    """Sizes 4, 4, 8, 40, 4 with room for 12: the first three together, the large one, the last."""
    layout = Layout.of({name: torch.zeros(size) for name, size in zip("abcde", (1, 1, 2, 10, 1), strict=True)})
    assert groups(layout, 16) == [["a", "b", "c"], ["d"], ["e"]]
    assert groups(layout, 1) == [["a"], ["b"], ["c"], ["d"], ["e"]]
