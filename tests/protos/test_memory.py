"""Memory for bundles: zeros that can be written to, of the size that was asked for."""

import mmap

import numpy as np
import pytest
import torch

from protos.codec import Layout, pack, unpack
from protos.memory import LARGE_BYTES, Recycler, zeros


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


def address(buffer: memoryview) -> int:
    """Where it lies."""
    return np.frombuffer(buffer, np.uint8).ctypes.data


def test_memory_is_used_again_once_nobody_looks_at_it() -> None:
    """Not before the last tensor that lies in it is gone, from whatever it was made."""
    recycler = Recycler()
    first = recycler.take(LARGE_BYTES)
    place, layout = address(first), Layout.of({"a": torch.zeros(LARGE_BYTES // 4)})
    tensor = unpack(first[:], layout)["a"][10:20]
    del first
    assert address(recycler.take(LARGE_BYTES)) != place
    tensor.fill_(3.0)
    del tensor
    again = recycler.take(LARGE_BYTES)
    assert address(again) == place
    assert np.frombuffer(again, np.float32)[10] == 3.0


def test_memory_of_another_size_is_given_back() -> None:
    """Whoever takes a larger model has no room for the old one besides; small buffers are always new."""
    recycler = Recycler()
    recycler.take(LARGE_BYTES)
    recycler.take(1)
    recycler.take(2 * LARGE_BYTES)[0] = 7
    assert recycler.take(LARGE_BYTES)[0] == 0
    assert recycler.take(2 * LARGE_BYTES)[0] == 0
