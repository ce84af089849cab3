"""Sums and evaluations in parts: the bits of one process, for tensors of every dtype and any number of parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_ops.simulate.engines.engine import Part, PartResult
from fl_ops.simulate.shared_work import SharedWork
from fl_server.aggregation.reduction import sum_updates
from fl_server.aggregation.updates import BLOCK_BYTES, UpdateShape
from protos.codec import Layout, pack

LONG = BLOCK_BYTES // 4 + 17
ROWS = [(0.25, 0.5, 0.25), (1.0, -3.0, 0.1)]


class Here:
    """Does the parts in this process, one after the other."""

    def __init__(self, *, free: bool = True) -> None:
        """free: whether its processes have no other work."""
        self.free, self.parts = free, 0

    def share(self, parts: Sequence[Part]) -> list[PartResult] | None:
        self.parts += len(parts)
        return [part.result(None) for part in parts] if self.free else None  # type: ignore[arg-type]  # sums need none


def update(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of every floating dtype, one longer than a block, one empty."""
    torch.manual_seed(seed)
    return {
        "a": torch.randn(3, 5),
        "b": torch.randn(LONG),
        "half": torch.randn(7).bfloat16(),
        "wide": torch.randn(11, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "c": torch.randn(()),
        "running": torch.randn(3),
    }


def written(folder: Path) -> tuple[list[Path], Layout]:
    """Three updates as files."""
    layout = Layout.of(update(0), [name for name in update(0) if name != "running"])
    paths = []
    for seed in range(3):
        paths.append(folder / str(seed))
        paths[-1].write_bytes(pack(update(seed), layout))
    return paths, layout


def work(layout: Layout, engine: Here, processes: int, folder: Path) -> SharedWork:
    """For updates with this layout."""
    server: Any = SimpleNamespace(shapes=[UpdateShape.of(["delta"], layout, layout)])
    return SharedWork(server, engine, processes, folder)  # type: ignore[arg-type]


@pytest.mark.parametrize("processes", [1, 2, 3, 50])
def test_sums_have_the_bits_of_one_process(tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors at once and each one alone, also with more processes than blocks."""
    monkeypatch.setattr("fl_ops.simulate.shared_work.LEAST_BYTES", 0)
    paths, layout = written(tmp_path)
    engine = Here()
    shared = work(layout, engine, processes, tmp_path)
    expected = sum_updates(paths, layout, ROWS)
    for entry in (None, *layout.entries):
        part = layout if entry is None else Layout((entry,), layout.size_bytes)
        for came, right in zip(shared.sum_updates(paths, part, ROWS), expected, strict=True):
            names = [each.name for each in part.entries if each.trainable]
            assert list(came) == names
            for name in names:
                assert came[name].dtype == right[name].dtype
                assert torch.equal(came[name], right[name])
    assert engine.parts <= processes  # they are summed once
    assert bool(engine.parts) == (processes > 1)


def test_other_updates_are_summed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer updates, or other coefficients, than those whose sums are known."""
    monkeypatch.setattr("fl_ops.simulate.shared_work.LEAST_BYTES", 0)
    paths, layout = written(tmp_path)
    shared = work(layout, Here(), 2, tmp_path)
    shared.sum_updates(paths, layout, ROWS)
    for sources, rows in ((paths[:2], [(0.5, 0.5)]), (paths, [(1.0, 1.0, 1.0)])):
        (came,) = shared.sum_updates(sources, layout, rows)
        (right,) = sum_updates(sources, layout, rows)
        assert all(torch.equal(came[name], right[name]) for name in right)


def test_processes_at_work_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sums then."""
    monkeypatch.setattr("fl_ops.simulate.shared_work.LEAST_BYTES", 0)
    paths, layout = written(tmp_path)
    (came, _) = work(layout, Here(free=False), 2, tmp_path).sum_updates(paths, layout, ROWS)
    (right, _) = sum_updates(paths, layout, ROWS)
    assert all(torch.equal(came[name], right[name]) for name in right)


def test_small_sums_are_not_shared(tmp_path: Path) -> None:
    """The updates here have fewer bytes than messages are worth."""
    paths, layout = written(tmp_path)
    engine = Here()
    work(layout, engine, 2, tmp_path).sum_updates(paths, layout, ROWS)
    assert engine.parts == 0
