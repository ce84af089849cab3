"""Memory for bundles: writable zeros of the requested size."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from protos.buffers import LARGE_BYTES, BufferPool, zeros
from protos.codec import Layout, pack, unpack


@pytest.mark.parametrize("size", [0, 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 3 * LARGE_BYTES + 7])
def test_a_buffer_is_zero_and_writable(size: int) -> None:
    """This holds for small and large buffers, to the last byte."""
    buffer = zeros(size)
    assert len(buffer) == size
    assert not np.frombuffer(buffer, np.uint8).any()
    if size:
        buffer[-1] = 7
        assert buffer[-1] == 7


def test_tensors_keep_it_alive() -> None:
    """The contents can be read when there is no other reference to the buffer."""
    tensors = {"a": torch.arange(2 * LARGE_BYTES, dtype=torch.float32)}
    layout = Layout.of(tensors)
    assert torch.equal(unpack(pack(tensors, layout), layout)["a"], tensors["a"])


def test_too_large_a_size_is_an_error() -> None:
    """An impossible size is an error like any other lack of memory."""
    with pytest.raises(MemoryError):
        zeros(1 << 60)


def test_a_kernel_without_large_pages_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without large pages the memory has the same content."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)
    assert len(zeros(LARGE_BYTES)) == LARGE_BYTES
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert len(zeros(LARGE_BYTES)) == LARGE_BYTES


def address(buffer: memoryview) -> int:
    """The address of a buffer."""
    return np.frombuffer(buffer, np.uint8).ctypes.data


def test_unreferenced_memory_is_reused() -> None:
    """Memory is reused only after its last tensor is released."""
    recycler = BufferPool()
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


def test_memory_of_another_size_is_released() -> None:
    """A larger model does not need memory in addition to the old one; small buffers are always new."""
    recycler = BufferPool()
    recycler.take(LARGE_BYTES)
    recycler.take(1)
    recycler.take(2 * LARGE_BYTES)[0] = 7
    assert recycler.take(LARGE_BYTES)[0] == 0
    assert recycler.take(2 * LARGE_BYTES)[0] == 0
