"""The files of an averaged model: made block by block, whole or absent, and read with their digests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from algorithms.averaging import Averaging, stepped
from fl_server.store.checkpoint_files import BLOCK, AveragedModel, Sums
from fl_server.store.checkpoints import Checkpoint, Checkpoints

RULE = Averaging("window", window=4)


def a_model(round_: int) -> dict[str, torch.Tensor]:
    """Tensors of every kind, one longer than a block, one empty."""
    torch.manual_seed(round_)
    return {
        "w": torch.randn(3, BLOCK // 2),
        "half": torch.randn(5).bfloat16(),
        "wide": torch.randn((), dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "steps": torch.tensor(round_),
    }


def a_checkpoint(round_: int, before: Sums | None) -> Checkpoint:
    """The checkpoint of a round, whose sums are made from those in the folder `before`."""
    model = a_model(round_)
    averaged = AveragedModel(RULE, round_, model, before=before)
    return Checkpoint({**model, "frozen": torch.ones(2)}, tied={"tied": "w"}, averaged=averaged)


def saved(folder: Path, rounds: int) -> tuple[Checkpoints, Path | None]:
    """Checkpoints of so many rounds, and the folder of the last one."""
    checkpoints, last = Checkpoints(folder), None
    for round_ in range(rounds):
        last = checkpoints.save("r", round_, a_checkpoint(round_, last))
    return checkpoints, last


def files_of(folder: Path) -> dict[str, bytes]:
    """The content of a checkpoint."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_is_the_whole_state_dict_of_the_mean(tmp_path: Path) -> None:
    """Floating values are means of float64 sums; integers are the latest; frozen and tied names are there."""
    _, last = saved(tmp_path, 3)
    assert last is not None
    averaged = load_file(last / "averaged.safetensors")
    assert averaged.keys() == load_file(last / "model.safetensors").keys()
    models = [a_model(round_) for round_ in range(3)]
    for name in ("w", "half", "wide", "empty"):
        total = sum((model[name].double() for model in models[1:]), models[0][name].double())
        assert torch.equal(averaged[name], (total / 3).to(models[0][name].dtype))
    assert (int(averaged["steps"]), averaged["frozen"].tolist()) == (2, [1.0, 1.0])
    assert torch.equal(averaged["tied"], averaged["w"])


def test_no_sum_is_ever_whole_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are read, stepped and written in blocks."""
    sizes: list[int] = []

    def recorded(before: torch.Tensor | None, x: torch.Tensor, term: Any) -> torch.Tensor:
        sizes.append(x.numel())
        return stepped(before, x, term)

    monkeypatch.setattr("fl_server.store.checkpoint_files.stepped", recorded)
    saved(tmp_path, 3)
    assert max(sizes) == BLOCK < a_model(0)["w"].numel()


@pytest.mark.parametrize("at", [0, 2, 6])
def test_a_process_that_ends_while_it_writes_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The checkpoint before stays as it was, and the next process writes the same bytes as an undisturbed one."""
    _, undisturbed = saved(tmp_path / "undisturbed", 4)
    checkpoints, last = saved(tmp_path / "killed", 3)
    assert undisturbed is not None
    assert last is not None
    before, blocks = files_of(last), 0

    def dies(*arguments: Any) -> torch.Tensor:
        nonlocal blocks
        blocks += 1
        if blocks > at:
            raise KeyboardInterrupt
        return stepped(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr("fl_server.store.checkpoint_files.stepped", dies)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save("r", 3, a_checkpoint(3, last))
    assert files_of(last) == before
    restarted = Checkpoints(tmp_path / "killed")
    assert restarted.rounds("r") == [0, 1, 2]
    found = restarted.latest("r")
    assert found is not None
    assert found.averaged is not None
    made = restarted.save("r", 3, a_checkpoint(3, found.averaged.sums))
    assert files_of(made) == files_of(undisturbed)


@pytest.mark.parametrize("name", ["averaged.safetensors", "sum-a.f64", "sum-b.f64"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_file_damages_its_checkpoint(tmp_path: Path, name: str, damage: str) -> None:
    """The one before it is used: no later average is made from damaged sums."""
    checkpoints, last = saved(tmp_path, 4)
    assert last is not None
    content = (last / name).read_bytes()
    if damage == "gone":
        (last / name).unlink()
    else:
        (last / name).write_bytes(content[:-1] + (bytes([content[-1] ^ 1]) if damage == "flipped" else b""))
    found = checkpoints.latest("r")
    assert found is not None
    assert found.facts["round"] == 2


def test_sums_are_copied_as_they_are(tmp_path: Path) -> None:
    """Into another folder, as by a save of a simulation: the same files and the same average."""
    _, last = saved(tmp_path, 4)
    model = replace(AveragedModel(RULE, 3, a_model(3)), sums=last)
    copy = tmp_path / "copy"
    copy.mkdir()
    entries = model.write_sums(copy)
    again = replace(model, sums=copy)
    assert sorted(entries) == ["sum-a.f64", "sum-b.f64"]
    assert all(torch.equal(again.values()[name], tensor) for name, tensor in model.values().items())


def test_sums_in_memory_have_the_bits_of_files(tmp_path: Path) -> None:
    """In a run that goes on from files, too; written, they are the files."""
    _, last = saved(tmp_path, 6)
    _, first = saved(tmp_path / "other", 2)
    assert last is not None
    sums: Sums | None = first
    for round_ in range(2, 6):
        model = AveragedModel(RULE, round_, a_model(round_), before=sums).in_memory()
        sums = model.sums
    copy = tmp_path / "copy"
    copy.mkdir()
    model.write_sums(copy)
    assert {name: (last / name).read_bytes() for name in model.files} == files_of(copy)
    filed = replace(model, sums=last).values()
    assert all(torch.equal(filed[name], tensor) for name, tensor in model.values().items())
