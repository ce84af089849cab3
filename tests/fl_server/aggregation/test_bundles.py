"""Tensors that are in wire layout are sent without a copy."""

from __future__ import annotations

import pytest
import torch

from fl_server.aggregation.task_model import blank, groups, laid_out, packed
from protos.codec import Layout, LayoutError, pack

TENSORS = {"a": torch.arange(3, dtype=torch.int8), "b": torch.tensor([1.5, 2.5]), "none": torch.zeros(0, 2)}
LAYOUT = Layout.of(TENSORS, trainable=["b"])
"""3 bytes, a gap of 1 byte, 8 bytes."""


def test_tensors_in_wire_layout_are_not_copied() -> None:
    """A value that is written afterwards appears in the bytes: they are the tensor's memory."""
    tensors = laid_out(TENSORS, LAYOUT)
    memory = packed(tensors, LAYOUT)
    assert bytes(memory) == pack(TENSORS, LAYOUT)
    tensors["b"][1] = 7.0
    assert bytes(memory) == pack({**TENSORS, "b": torch.tensor([1.5, 7.0])}, LAYOUT)


@pytest.mark.parametrize("change", ["separate", "reversed", "gap"])
def test_tensors_in_another_layout_are_packed(change: str) -> None:
    """A tensor in memory of its own, values in reverse order, and a gap that is not zero: the bytes are correct."""
    tensors = laid_out(TENSORS, LAYOUT)
    if change == "separate":
        tensors = {**tensors, "b": tensors["b"].clone()}
    if change == "reversed":
        tensors["a"] = tensors["a"].flip(0)
    if change == "gap":
        torch.empty(0, dtype=torch.uint8).set_(tensors["a"].untyped_storage())[3] = 9
    assert bytes(packed(tensors, LAYOUT)) == pack(tensors, LAYOUT)


def test_bytes_for_sending_are_read_only() -> None:
    """The sender cannot change the model."""
    with pytest.raises(TypeError):
        memoryview(packed(laid_out(TENSORS, LAYOUT), LAYOUT))[0] = 1


def test_another_layout_is_refused() -> None:
    """Also when the tensors are in one memory."""
    with pytest.raises(LayoutError, match="'c'"):
        packed(blank(LAYOUT), Layout.of({"c": torch.zeros(3)}))


def test_blank_tensors_are_zero() -> None:
    """All tensors of the layout are zero and share one memory."""
    tensors = blank(LAYOUT)
    assert list(tensors) == ["a", "b", "none"]
    assert not any(bool(tensor.any()) for tensor in tensors.values())
    assert tensors["a"].untyped_storage().data_ptr() == tensors["b"].untyped_storage().data_ptr()


def test_small_tensors_are_grouped_and_a_large_one_is_alone() -> None:
    """Sizes of 4, 4, 8, 40 and 4 bytes in groups of 16: the first three, the large one, the last."""
    layout = Layout.of({name: torch.zeros(size) for name, size in zip("abcde", (1, 1, 2, 10, 1), strict=True)})
    assert groups(layout, 16) == [["a", "b", "c"], ["d"], ["e"]]
    assert groups(layout, 1) == [["a"], ["b"], ["c"], ["d"], ["e"]]
