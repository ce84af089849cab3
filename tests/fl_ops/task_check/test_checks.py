"""What `fl task check` finds in tasks with one fault each, and how it explains it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fl_ops.task_check import checks
from fl_tasks import Classifier, Examples, Shard


class Sound(Classifier):
    """Reads numbers from a file of each site."""

    classes: tuple[str, ...] = ("cat", "dog")

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def train_data(self, shard: Shard) -> Examples:
        lines = (shard.folder / "x").read_text().split() if shard.folder and any(shard.folder.iterdir()) else []
        inputs = torch.tensor([[float(part) for part in line.split(",")] for line in lines]).reshape(-1, self.columns)
        return Examples(inputs, (inputs[:, 0] > 0).long() if len(lines) else torch.empty(0, dtype=torch.int64))

    columns = 3

    def eval_data(self, shard: Shard | None = None) -> Examples | None:
        return Examples(torch.ones(4, 3), torch.ones(4, dtype=torch.int64)) if shard is None else None


class Narrow(Sound):
    def model(self) -> nn.Module:
        return nn.Linear(5, 2)


class Normalised(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Nameless(Sound):
    classes: tuple[str, ...] = ()


class Drawn(Sound):
    """Data in an order that nobody fixed."""

    calls = 0

    def train_data(self, shard: Shard) -> Examples:
        Drawn.calls += 1
        data = super().train_data(shard)
        return data[torch.arange(len(data)).roll(Drawn.calls)]


class NeedsFiles(Sound):
    def train_data(self, shard: Shard) -> Examples:
        assert shard.folder is not None
        (shard.folder / "x").read_text()
        return super().train_data(shard)


@pytest.fixture
def sites(tmp_path: Path) -> list[Path]:
    """Two folders with four examples each."""
    for name, lines in (("north", "1,2,3 -1,2,3 2,2,2 -1,0,0"), ("south", "-1,2,3 -1,1,1 -2,2,2 -1,0,0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(lines)
    return [tmp_path / "north", tmp_path / "south"]


def found(task: type, sites: list[Path]) -> list[tuple[str, str, str]]:
    """Each finding as (check, result, text)."""
    return [(one.check, one.result, one.text) for one in checks.findings(f"{__name__}:{task.__name__}", {}, sites)]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task's name has this module, which pytest imports from its file."""
    monkeypatch.setattr(checks, "load_task", lambda name, _options: globals()[name.rpartition(":")[2]]())
    monkeypatch.setattr(checks, "fingerprint", lambda _task: ("1", "sha256:0"))


def test_a_sound_task_has_no_remark(sites: list[Path]) -> None:
    """All checks are made, and the labels of both sites are counted by name."""
    all_found = found(Sound, sites)
    assert {result for _, result, _ in all_found} == {"ok"}
    assert dict(one[::2] for one in all_found)["labels"] == "2 classes by name. north: 2 cat, 2 dog; south: 4 cat"


@pytest.mark.parametrize(
    ("task", "check", "result", "text"),
    [
        (Narrow, "step", "FAIL", "expects 5 numbers for each example and gets 3"),
        (Normalised, "small shards", "remark", "a device with one example would fail"),
        (Normalised, "small shards", "remark", "use GroupNorm"),
        (Nameless, "labels", "remark", 'add classes = ["cat", "dog"]'),
        (Drawn, "determinism", "FAIL", "sort the files"),
        (NeedsFiles, "small shards", "remark", "a device with no example would fail"),
    ],
)
def test_a_fault_is_explained(sites: list[Path], task: type, check: str, result: str, text: str) -> None:
    """The finding has what is wrong, and what to do, in the words of the task's author."""
    assert any(one[:2] == (check, result) and text in one[2] for one in found(task, sites)), found(task, sites)


def test_sites_with_other_columns_are_refused(sites: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of each site's data is shown."""
    read = Sound.train_data
    wider: Callable[..., Examples] = lambda task, shard: (  # noqa: E731 - one expression
        Examples(torch.ones(4, 4), torch.ones(4, dtype=torch.int64)) if shard.folder == sites[1] else read(task, shard)
    )
    monkeypatch.setattr(Sound, "train_data", wider)
    (last,) = [text for _, result, text in found(Sound, sites) if result == "FAIL"]
    assert "expected data of one form at all sites, got north: (float32 [3], int64 []); south: (float32 [4]" in last
