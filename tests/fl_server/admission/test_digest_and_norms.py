"""Digest and norms of a file from a single read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fl_server.admission import norms as module
from fl_server.admission.norms import digest_and_norms
from fl_server.store.errors import StoreError
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
def test_digest_and_squares_of_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: int) -> None:
    """The same for any block size. Gaps and integers are in the digest only; every other value is in one sum."""
    monkeypatch.setattr(module, "READ_BYTES", read)
    (tmp_path / "x").write_bytes(data := bytes(pack(TENSORS, LAYOUT)))
    assert digest_and_norms(tmp_path / "x", LAYOUT.entries) == (digest_of(data), SQUARES)


@pytest.mark.parametrize("read", [8, 1 << 20])
@pytest.mark.parametrize("name", ["half", "wide", "brain", "plain"])
def test_one_value_that_is_not_finite_makes_its_sum_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, read: int
) -> None:
    """The last value of a tensor affects its own sum and no other."""
    monkeypatch.setattr(module, "READ_BYTES", read)
    damaged = TENSORS[name].clone()
    damaged[-1] = math.nan
    (tmp_path / "x").write_bytes(pack({**TENSORS, name: damaged}, LAYOUT))
    sums = digest_and_norms(tmp_path / "x", LAYOUT.entries)[1]
    assert [entry.name for entry, each in zip(LAYOUT.entries, sums, strict=True) if not math.isfinite(each)] == [name]


def test_bytes_behind_the_last_tensor_are_in_the_digest(tmp_path: Path) -> None:
    """All bytes of the file are covered."""
    (tmp_path / "x").write_bytes(data := bytes(pack(TENSORS, LAYOUT)) + b"behind")
    assert digest_and_norms(tmp_path / "x", LAYOUT.entries)[0] == digest_of(data)


def test_a_short_file_is_an_error(tmp_path: Path) -> None:
    """Missing tensors get no norm."""
    (tmp_path / "x").write_bytes(pack(TENSORS, LAYOUT)[:-1])
    with pytest.raises(StoreError, match="it is torn"):
        digest_and_norms(tmp_path / "x", LAYOUT.entries)
