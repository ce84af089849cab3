"""Sums over files are, bit for bit, the sums over tensors in memory, however they are cut."""

from __future__ import annotations

import pytest
import torch

from algorithms.aggregate import average_buffers as average_in_memory
from algorithms.aggregate import weighted_sums_of_tensors
from fl_server import reduce
from fl_server.reduce import average_buffers, sum_updates
from fl_server.store.base import StoreError
from protos.codec import Layout, LayoutError, pack

ROWS = [(0.25, 0.5, 0.25), (-1.7, 3.1e-3, 40.0)]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def updates(dtype=torch.float32, clients=3):
    """Whole updates: trainable tensors, an empty one and a scalar among them, and buffers of three dtypes."""
    chance = torch.Generator().manual_seed(1)

    def one():
        return {
            "weight": torch.randn(7, 5, generator=chance).to(dtype),
            "empty": torch.zeros(0, 3, dtype=dtype),
            "scalar": torch.randn((), generator=chance).to(dtype),
            "wide": torch.randn(3, generator=chance).double(),
            "mean": torch.randn(5, generator=chance),
            "count": torch.randint(-9, 9, (2,), generator=chance),
            "seen": torch.rand(4, generator=chance) > 0.5,
        }

    made = [one() for _ in range(clients)]
    return made, Layout.of(made[0], trainable=("weight", "empty", "scalar", "wide"))


def written(tmp_path, tensors, layout):
    """Each update in a file."""
    paths = [tmp_path / f"{index}.update" for index in range(len(tensors))]
    for path, each in zip(paths, tensors, strict=True):
        path.write_bytes(pack(each, layout))
    return paths


def of(layout, tensors, *, trainable):
    """The part of updates that is trained, or that is not."""
    names = [entry.name for entry in layout.entries if entry.trainable is trainable]
    return [{name: each[name] for name in names} for each in tensors]


def same(first, second):
    """Equal names in equal order, and equal bits."""
    assert list(first) == list(second)
    for name in first:
        assert (first[name].dtype, first[name].shape) == (second[name].dtype, second[name].shape), name
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("block_bytes", [1, 24, 256 << 10])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_of_files_are_the_sums_of_tensors(tmp_path, monkeypatch, dtype, block_bytes):
    """Two rows at once; blocks of one entry, of some entries, and of all give the same bits."""
    monkeypatch.setattr(reduce, "BLOCK_BYTES", block_bytes)
    tensors, layout = updates(dtype)
    came = sum_updates(written(tmp_path, tensors, layout), layout, ROWS)
    for total, expected in zip(came, weighted_sums_of_tensors(of(layout, tensors, trainable=True), ROWS), strict=True):
        same(total, expected)


@pytest.mark.parametrize("block_bytes", [1, 256 << 10])
def test_buffers_of_files_are_the_buffers_of_tensors(tmp_path, monkeypatch, block_bytes):
    """Floating ones averaged with the weights, integers and booleans at their maximum."""
    monkeypatch.setattr(reduce, "BLOCK_BYTES", block_bytes)
    tensors, layout = updates()
    weights = (0.2, 0.3, 0.5)
    came = average_buffers(written(tmp_path, tensors, layout), layout, weights)
    same(came, average_in_memory(of(layout, tensors, trainable=False), weights))
    assert came["count"].tolist() == torch.stack([each["count"] for each in tensors]).amax(0).tolist()


def test_a_sum_by_hand(tmp_path):
    """0.5 * [1, 2] + 0.25 * [4, 8] = [1.5, 3]."""
    layout = Layout.of({"w": torch.zeros(2)}, trainable=["w"])
    paths = written(tmp_path, [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([4.0, 8.0])}], layout)
    (total,) = sum_updates(paths, layout, [(0.5, 0.25)])
    assert total["w"].tolist() == [1.5, 3.0]


def test_a_model_without_buffers_has_none(tmp_path):
    """Nothing is averaged."""
    layout = Layout.of({"w": torch.zeros(2)}, trainable=["w"])
    paths = written(tmp_path, [{"w": torch.ones(2)}], layout)
    assert average_buffers(paths, layout, (1.0,)) == {}


def test_a_file_that_is_short_or_gone_is_an_error(tmp_path):
    """Nothing is summed in silence as if it were zero."""
    tensors, layout = updates()
    paths = written(tmp_path, tensors, layout)
    paths[1].write_bytes(paths[1].read_bytes()[:50])
    with pytest.raises(LayoutError, match="expected a buffer of 140 bytes, got 50"):
        sum_updates(paths, layout, ROWS)
    paths[1].unlink()
    with pytest.raises(StoreError, match="No such file"):
        sum_updates(paths, layout, ROWS)


def test_the_order_of_updates_is_the_callers(tmp_path):
    """1e16 + 1 - 1e16 is 0 in float64 and 1e16 - 1e16 + 1 is 1: nothing is reordered."""
    layout = Layout.of({"w": torch.zeros(1, dtype=torch.float64)}, trainable=["w"])
    tensors = [{"w": torch.tensor([value], dtype=torch.float64)} for value in (1e16, 1.0, -1e16)]
    paths = written(tmp_path, tensors, layout)
    ones = (1.0, 1.0, 1.0)
    assert sum_updates(paths, layout, [ones])[0]["w"].item() == 0.0
    assert sum_updates([paths[0], paths[2], paths[1]], layout, [ones])[0]["w"].item() == 1.0
