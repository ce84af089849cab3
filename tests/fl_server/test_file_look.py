"""A file's digest and its tensors' lengths, from one reading of it."""

from __future__ import annotations

import math

import pytest
import torch

from fl_server import file_look
from fl_server.file_look import look_through
from fl_server.store.base import StoreError
from protos.codec import Layout, digest_of, pack

TENSORS = {
    "half": torch.tensor([1.0, 2.0], dtype=torch.float16),
    "count": torch.tensor([7, 8, 9]),
    "flag": torch.tensor([True]),
    "wide": torch.tensor([3.0, 4.0, 5.0], dtype=torch.float64),
    "none": torch.empty(0),
    "brain": torch.tensor([2.0, 3.0, 6.0], dtype=torch.bfloat16),
    "plain": torch.arange(9, dtype=torch.float32),
}
SQUARES = [1 + 4, 0, 0, 9 + 16 + 25, 0, 4 + 9 + 36, 204]
"""By hand; the last is 8 * 9 * 17 / 6."""
LAYOUT = Layout.of(TENSORS)


@pytest.mark.parametrize("read", [8, 24, 40, 1 << 20])
def test_digest_and_squares_of_all_bytes(tmp_path, monkeypatch, read):
    """The same however it is cut: gaps and integers are in the digest and in no sum, and every value is in one."""
    monkeypatch.setattr(file_look, "READ_BYTES", read)
    (tmp_path / "x").write_bytes(data := bytes(pack(TENSORS, LAYOUT)))
    assert look_through(tmp_path / "x", LAYOUT.entries) == (digest_of(data), SQUARES)


@pytest.mark.parametrize("read", [8, 1 << 20])
@pytest.mark.parametrize("name", ["half", "wide", "brain", "plain"])
def test_one_value_that_is_not_finite_makes_its_sum_so(tmp_path, monkeypatch, name, read):
    """The last one of its tensor, and no other tensor's sum."""
    monkeypatch.setattr(file_look, "READ_BYTES", read)
    harmed = TENSORS[name].clone()
    harmed[-1] = math.nan
    (tmp_path / "x").write_bytes(pack({**TENSORS, name: harmed}, LAYOUT))
    sums = look_through(tmp_path / "x", LAYOUT.entries)[1]
    assert [entry.name for entry, each in zip(LAYOUT.entries, sums, strict=True) if not math.isfinite(each)] == [name]


def test_bytes_behind_the_last_tensor_are_in_the_digest(tmp_path):
    """They are part of the file, whatever they are."""
    (tmp_path / "x").write_bytes(data := bytes(pack(TENSORS, LAYOUT)) + b"behind")
    assert look_through(tmp_path / "x", LAYOUT.entries)[0] == digest_of(data)


def test_a_file_that_is_too_short_is_torn(tmp_path):
    """Nothing is said of tensors that are not there."""
    (tmp_path / "x").write_bytes(pack(TENSORS, LAYOUT)[:-1])
    with pytest.raises(StoreError, match="it is torn"):
        look_through(tmp_path / "x", LAYOUT.entries)
