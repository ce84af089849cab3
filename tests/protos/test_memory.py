"""Memory for bundles: zeros that can be written to, of the size that was asked for."""

import mmap

import numpy as np
import pytest
import torch

from protos.codec import Layout, pack, unpack
from protos.memory import LARGE_BYTES, zeros


@pytest.mark.parametrize("size", [0, 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 3 * LARGE_BYTES + 7])
def test_it_is_zero_and_can_be_written_to(size: int) -> None:
    """Small or large, to the last byte."""
    buffer = zeros(size)
    assert len(buffer) == size
    assert not np.frombuffer(buffer, np.uint8).any()
    if size:
        buffer[-1] = 7
        assert buffer[-1] == 7


def test_tensors_keep_it_alive() -> None:
    """What lies in it can be read when nobody else has the buffer any more."""
    tensors = {"a": torch.arange(2 * LARGE_BYTES, dtype=torch.float32)}
    layout = Layout.of(tensors)
    assert torch.equal(unpack(pack(tensors, layout), layout)["a"], tensors["a"])


def test_more_than_there_is_is_told() -> None:
    """A size that no machine has is an error like any other want of memory."""
    with pytest.raises(MemoryError):
        zeros(1 << 60)


def test_a_kernel_without_large_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they cannot be asked for, or are refused, the memory is the same."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)
    assert len(zeros(LARGE_BYTES)) == LARGE_BYTES
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert len(zeros(LARGE_BYTES)) == LARGE_BYTES
