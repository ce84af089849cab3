"""The mean has the bits of the algorithms in memory, and a client's share of a round's examples can be limited."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms import UpdateInfo, example_weights
from algorithms.aggregate import average_buffers as average_in_memory
from algorithms.aggregate import weighted_sums_of_tensors
from algorithms.base import Tensors
from fl_server.aggregation.reduction import average_buffers, capped, sum_updates
from fl_server.store.errors import StoreError
from protos.codec import Layout, LayoutError, pack

ROWS = [(0.25, 0.5, 0.25), (-1.7, 3.1e-3, 40.0)]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def updates(dtype: torch.dtype = torch.float32, clients: int = 3) -> tuple[list[Tensors], Layout]:
    """Whole updates: trainable tensors (one empty, one a scalar) and buffers of three dtypes."""
    generator = torch.Generator().manual_seed(1)

    def one() -> Tensors:
        return {
            "weight": torch.randn(7, 5, generator=generator).to(dtype),
            "empty": torch.zeros(0, 3, dtype=dtype),
            "scalar": torch.randn((), generator=generator).to(dtype),
            "wide": torch.randn(3, generator=generator).double(),
            "mean": torch.randn(5, generator=generator),
            "count": torch.randint(-9, 9, (2,), generator=generator),
            "seen": torch.rand(4, generator=generator) > 0.5,
        }

    tensors = [one() for _ in range(clients)]
    return tensors, Layout.of(tensors[0], trainable=("weight", "empty", "scalar", "wide"))


def written(tmp_path: Path, tensors: Sequence[Tensors], layout: Layout) -> list[Path]:
    """Write each update to a file."""
    paths = [tmp_path / f"{index}.update" for index in range(len(tensors))]
    for path, each in zip(paths, tensors, strict=True):
        path.write_bytes(pack(each, layout))
    return paths


def of(layout: Layout, tensors: Sequence[Tensors], *, trainable: bool) -> list[Tensors]:
    """The trainable tensors of updates, or the others."""
    names = [entry.name for entry in layout.entries if entry.trainable is trainable]
    return [{name: each[name] for name in names} for each in tensors]


def same(first: Tensors, second: Tensors) -> None:
    """Equal names in equal order, and equal bits."""
    assert list(first) == list(second)
    for name in first:
        assert (first[name].dtype, first[name].shape) == (second[name].dtype, second[name].shape), name
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("block_bytes", [1, 24, 256 << 10])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_of_files_are_the_sums_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block_bytes: int
) -> None:
    """Two rows at once. Blocks of one entry, of some entries and of all entries give the same bits."""
    monkeypatch.setattr("fl_server.aggregation.updates.BLOCK_BYTES", block_bytes)
    tensors, layout = updates(dtype)
    result = sum_updates(written(tmp_path, tensors, layout), layout, ROWS)
    for total, expected in zip(
        result, weighted_sums_of_tensors(of(layout, tensors, trainable=True), ROWS), strict=True
    ):
        same(total, expected)


@pytest.mark.parametrize("block_bytes", [1, 256 << 10])
def test_buffers_of_files_are_the_buffers_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """Floating buffers are averaged with the weights; of integers and booleans the maximum is taken."""
    monkeypatch.setattr("fl_server.aggregation.updates.BLOCK_BYTES", block_bytes)
    tensors, layout = updates()
    weights = (0.2, 0.3, 0.5)
    result = average_buffers(written(tmp_path, tensors, layout), layout, weights)
    same(result, average_in_memory(of(layout, tensors, trainable=False), weights))
    assert result["count"].tolist() == torch.stack([each["count"] for each in tensors]).amax(0).tolist()


def test_a_sum_by_hand(tmp_path: Path) -> None:
    """0.5 * [1, 2] + 0.25 * [4, 8] = [1.5, 3]."""
    layout = Layout.of({"w": torch.zeros(2)}, trainable=["w"])
    paths = written(tmp_path, [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([4.0, 8.0])}], layout)
    (total,) = sum_updates(paths, layout, [(0.5, 0.25)])
    assert total["w"].tolist() == [1.5, 3.0]


def test_a_model_without_buffers_has_none(tmp_path: Path) -> None:
    """The average of no buffers is empty."""
    layout = Layout.of({"w": torch.zeros(2)}, trainable=["w"])
    paths = written(tmp_path, [{"w": torch.ones(2)}], layout)
    assert average_buffers(paths, layout, (1.0,)) == {}


def test_small_tensors_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is opened once for neighbours of one dtype that fit into a block, not once for each tensor."""
    tensors, layout = updates()
    paths, opened, open_ = written(tmp_path, tensors, layout), list[object](), os.open

    def counted(path: str, *args: int) -> int:
        opened.append(path)
        return open_(path, *args)

    monkeypatch.setattr(os, "open", counted)
    sum_updates(paths, layout, [(1.0, 1.0, 1.0)])
    assert len(opened) == 2 * len(paths)  # float32 and float64


def test_a_short_or_missing_file_is_an_error(tmp_path: Path) -> None:
    """Missing values are never silently summed as zeros."""
    tensors, layout = updates()
    paths = written(tmp_path, tensors, layout)
    paths[1].write_bytes(paths[1].read_bytes()[:50])
    with pytest.raises(LayoutError, match="expected a buffer of 144 bytes, got 50"):
        sum_updates(paths, layout, ROWS)
    paths[1].unlink()
    with pytest.raises(StoreError, match="No such file"):
        sum_updates(paths, layout, ROWS)


def test_updates_are_summed_in_the_callers_order(tmp_path: Path) -> None:
    """In float64, 1e16 + 1 - 1e16 is 0 and 1e16 - 1e16 + 1 is 1: nothing is reordered."""
    layout = Layout.of({"w": torch.zeros(1, dtype=torch.float64)}, trainable=["w"])
    tensors = [{"w": torch.tensor([value], dtype=torch.float64)} for value in (1e16, 1.0, -1e16)]
    paths = written(tmp_path, tensors, layout)
    ones = (1.0, 1.0, 1.0)
    assert sum_updates(paths, layout, [ones])[0]["w"].item() == 0.0
    assert sum_updates([paths[0], paths[2], paths[1]], layout, [ones])[0]["w"].item() == 1.0


COUNTS = st.lists(st.integers(10_000, 2**53), min_size=1, max_size=12)


def weights(counts: list[int], share: float) -> Sequence[float]:
    """Weights of a cohort with these numbers of examples, capped."""
    return example_weights(capped([UpdateInfo(str(at), count, 1) for at, count in enumerate(counts)], share))


@given(COUNTS, st.floats(0.01, 1.0))
def test_no_weight_exceeds_the_share_unless_all_are_equal(counts: list[int], share: float) -> None:
    """For any counts; no client gets more examples than it has."""
    result = weights(counts, share)
    assert max(result) <= share + 1e-3 or len(set(result)) == 1
    after = capped([UpdateInfo(str(at), count, 1) for at, count in enumerate(counts)], share)
    assert all(info.num_examples <= count for info, count in zip(after, counts, strict=True))


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([10, 10, 2**53], 0.5, [10, 10, 20]),
        ([100, 100, 10, 10], 0.25, [10, 10, 10, 10]),
        ([1000, 2000, 50, 50, 100], 0.4, [400, 400, 50, 50, 100]),
        ([1, 2, 3], 0.5, [1, 2, 3]),
        ([5, 500], 0.4, [5, 5]),
        ([7], 0.5, [7]),
    ],
)
def test_the_cap_by_hand(counts: list[int], share: float, expected: list[int]) -> None:
    """c = share * (k c + rest) for the k capped clients: 0.4 (2 * 400 + 200) = 400."""
    after = capped([UpdateInfo(str(at), count, 1) for at, count in enumerate(counts)], share)
    assert [info.num_examples for info in after] == expected
