"""Checkpoints: whole or not there, the newest valid one wins, and a full disk harms none."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from structlog.testing import capture_logs

from fl_server.store import bundle_files, checkpoints
from fl_server.store.base import StoreError, StoreFull
from fl_server.store.checkpoints import INITIAL, Checkpoint, Checkpoints

SAVE_UNDER_A_LIMIT = """
import resource, signal, sys, torch
from fl_server.store.base import StoreFull
from fl_server.store.checkpoints import Checkpoint, Checkpoints
saved = Checkpoints(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    saved.save("r1", 1, Checkpoint({"w": torch.zeros(100_000)}))
except StoreFull as error:
    print("full:", error)
"""
STEPS = [("mkdir", 0), ("save_file", 0), ("save_file", 1), ("write_durably", 0), ("rename", 0)]
STEPS += [("fsync_path", at) for at in range(4)]
"""Model, memory, folder and the folder above are fsynced there; meta.json where it is written."""


def a_checkpoint(value: float = 1.0) -> Checkpoint:
    """A model of two tensors, not in the order of their names, and a momentum."""
    model = {"w": torch.full((2, 3), value), "b": torch.tensor([0.1 + value], dtype=torch.float64)}
    memory = {"Delta": {"w": torch.full((2, 3), -value)}}
    return Checkpoint(model, memory, {"seed": 7, "learning_rate": 0.1, "digests": ["x"]})


def value_of(checkpoint: Checkpoint | None) -> float | None:
    """What `a_checkpoint` was made with."""
    return None if checkpoint is None else float(checkpoint.model["w"][0, 0])


def names(folder: Path) -> list[str]:
    """What lies in a folder, sorted."""
    return sorted(each.name for each in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the checkpoints lie."""
    return tmp_path / "checkpoints"


@pytest.fixture
def saved(folder: Path) -> Checkpoints:
    """Checkpoints of run "r1" for rounds 0 (value 1) and 1 (value 2)."""
    saved = Checkpoints(folder)
    for round in range(2):
        saved.save("r1", round, a_checkpoint(round + 1.0))
    return saved


def test_a_checkpoint_comes_back_bit_for_bit(saved: Checkpoints) -> None:
    """Tensors, their types and order, memory and facts; the round is among the facts."""
    checkpoint, expected = saved.load("r1", 1), a_checkpoint(2.0)
    assert list(checkpoint.model) == ["w", "b"]
    assert all(torch.equal(checkpoint.model[name], tensor) for name, tensor in expected.model.items())
    assert checkpoint.model["b"].dtype == torch.float64
    assert torch.equal(checkpoint.memory["Delta"]["w"], expected.memory["Delta"]["w"])
    assert checkpoint.facts == {**expected.facts, "round": 1}


def test_the_latest_is_the_newest_round(saved: Checkpoints, folder: Path) -> None:
    """By number, also in a process that opens the directory anew."""
    saved.save("r1", 10, a_checkpoint(11.0))
    assert value_of(Checkpoints(folder).latest("r1")) == 11.0
    assert saved.rounds("r1") == [0, 1, 10]


def test_a_run_without_checkpoints_has_no_latest(saved: Checkpoints) -> None:
    """An unknown run has nothing, which is no error."""
    assert saved.latest("r2") is None
    assert saved.rounds("r2") == []


def test_the_first_model_is_older_than_round_0(saved: Checkpoints) -> None:
    """The model before any round is kept as round -1."""
    saved.save("r1", INITIAL, a_checkpoint(0.5))
    assert saved.rounds("r1") == [-1, 0, 1]
    assert value_of(saved.load("r1", INITIAL)) == 0.5


@pytest.mark.parametrize("file", ["model.safetensors", "memory-Delta.safetensors", "meta.json"])
@pytest.mark.parametrize("harm", ["torn", "flipped", "gone"])
def test_the_newest_valid_one_wins(saved: Checkpoints, folder: Path, file: str, harm: str) -> None:
    """A damaged newest checkpoint is told of and put aside, and the one before it is taken."""
    path = folder / "run-r1" / "round-000001" / file
    content = path.read_bytes()
    torn = {"torn": content[:-3], "flipped": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]}
    path.write_bytes(torn[harm]) if harm in torn else path.unlink()
    with capture_logs() as logs:
        assert value_of(saved.latest("r1")) == 1.0
    assert [(log["event"], log["log_level"], log["round"]) for log in logs] == [("checkpoint_damaged", "warning", 1)]
    assert names(folder / "run-r1") == ["round-000000", "round-000001.damaged"]


def test_a_damaged_checkpoint_cannot_be_loaded(saved: Checkpoints, folder: Path) -> None:
    """Whoever asks for that very round is told, and nothing is moved."""
    (folder / "run-r1" / "round-000000" / "model.safetensors").write_bytes(b"")
    with pytest.raises(StoreError, match=r"round-000000 is damaged: model.safetensors should be .* is 0 bytes"):
        saved.load("r1", 0)
    assert saved.rounds("r1") == [0, 1]


def test_a_missing_round_is_told_with_those_there_are(saved: Checkpoints) -> None:
    """The error helps to choose another."""
    with pytest.raises(StoreError, match="no checkpoint of round 7; there are: 0, 1"):
        saved.load("r1", 7)
    with pytest.raises(StoreError, match="no model of round 7; there are: 0, 1"):
        saved.model_file("r1", 7)


def test_a_newer_format_is_not_called_damaged(saved: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a newer program is refused in words and stays where it is."""
    with monkeypatch.context() as patch:
        patch.setattr(bundle_files, "FORMAT", 2)
        saved.save("r1", 2, a_checkpoint())
    with pytest.raises(StoreError, match="checkpoint format 2; this program knows 1: start the version that wrote it"):
        saved.latest("r1")
    assert saved.rounds("r1") == [0, 1, 2]


def test_a_round_can_be_saved_again(saved: Checkpoints, folder: Path) -> None:
    """A round made again after a crash takes the place of the first try."""
    saved.save("r1", 1, a_checkpoint(5.0))
    assert value_of(saved.load("r1", 1)) == 5.0
    assert names(folder / "run-r1") == ["round-000000", "round-000001"]


def test_the_model_file_is_plain_safetensors(saved: Checkpoints) -> None:
    """Any tool that reads safetensors gets the state_dict's names from it, and nothing else."""
    with safe_open(saved.model_file("r1", 0), framework="pt") as file:
        assert sorted(file.keys()) == ["b", "w"]
        assert torch.equal(file.get_tensor("w"), a_checkpoint(1.0).model["w"])


def test_loaded_tensors_outlive_their_file(saved: Checkpoints) -> None:
    """A loaded model is memory of its own: cutting the file to nothing does not reach it."""
    checkpoint = saved.load("r1", 0)
    saved.model_file("r1", 0).write_bytes(b"")
    assert value_of(checkpoint) == 1.0


def test_tensors_that_share_memory_are_saved(saved: Checkpoints) -> None:
    """Views of one flat buffer, tied weights and a transposed tensor all come back with their values."""
    flat = torch.arange(6.0)
    model = {"a": flat[:2], "c": flat[2:], "tied": flat[:2], "t": torch.arange(6.0).reshape(2, 3).T}
    saved.save("r1", 2, Checkpoint(model))
    loaded = saved.load("r1", 2).model
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.items())


def test_facts_must_be_json(saved: Checkpoints) -> None:
    """A tensor among the facts is refused before anything takes the round's name."""
    with pytest.raises(StoreError, match="facts must be JSON values"):
        saved.save("r1", 2, Checkpoint({}, facts={"x": torch.zeros(1)}))
    assert saved.rounds("r1") == [0, 1]


def test_pruning_keeps_what_it_is_told(saved: Checkpoints, folder: Path) -> None:
    """All rounds but those named go, without a trace."""
    saved.save("r1", 2, a_checkpoint())
    saved.prune("r1", {0, 2, 99})
    assert names(folder / "run-r1") == ["round-000000", "round-000002"]


def test_a_removed_run_leaves_the_others(saved: Checkpoints, folder: Path) -> None:
    """Removing twice is no error."""
    saved.save("r2", 0, a_checkpoint())
    saved.remove_run("r1")
    saved.remove_run("r1")
    assert names(folder) == ["run-r2"]


def test_leftovers_are_cleared_when_opened(saved: Checkpoints, folder: Path) -> None:
    """What a killed process had half written is removed; what it had half replaced comes back."""
    run = folder / "run-r1"
    (run / ".part-round-000002").mkdir()
    (run / "round-000001").rename(run / ".replaced-round-000001")
    (run / ".replaced-round-000000").mkdir()
    assert Checkpoints(folder).rounds("r1") == [0, 1]
    assert names(run) == ["round-000000", "round-000001"]


@pytest.mark.parametrize("run_id", ["", "a/b", "x" * 65, "ü", "a\n"])
def test_a_run_id_cannot_leave_the_directory(saved: Checkpoints, run_id: str) -> None:
    """Ids come from outside: those that are no plain names are refused."""
    with pytest.raises(StoreError, match="a run id must be 1 to 64 of the characters"):
        saved.save(run_id, 0, a_checkpoint())


def test_a_run_named_by_dots_stays_inside(saved: Checkpoints, folder: Path) -> None:
    """The name ".." is one of allowed characters, and harmless behind its prefix."""
    saved.save("..", 0, a_checkpoint())
    assert names(folder) == ["run-..", "run-r1"]


def failing(original: Callable[..., object], error: OSError, at: int) -> Callable[..., object]:
    """The function, but for its call number `at`, counted from 0, which raises."""
    calls = iter(range(1_000))

    def call(*args: object, **kwargs: object) -> object:
        if next(calls) == at:
            raise error
        return original(*args, **kwargs)

    return call


def break_step(patch: pytest.MonkeyPatch, step: str, error: OSError, at: int) -> None:
    """Let call number `at` of one step of `save` fail, wherever it is made."""
    places: list[object] = [each for each in (bundle_files, checkpoints) if hasattr(each, step)] or [Path]
    broken = failing(getattr(places[0], step), error, at)
    for place in places:
        patch.setattr(place, step, broken)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=["full", "read-only", "forbidden"])
@pytest.mark.parametrize(("step", "at"), STEPS)
def test_a_full_disk_at_any_step_harms_nothing(
    saved: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int, at: int
) -> None:
    """Whichever write fails, the error is StoreFull, older rounds stay, nothing half is left, a retry works."""
    with monkeypatch.context() as patch:
        break_step(patch, step, OSError(code, os.strerror(code)), at)
        with pytest.raises(StoreFull, match=os.strerror(code)):
            saved.save("r1", 2, a_checkpoint(3.0))
    assert value_of(saved.load("r1", 1)) == 2.0
    assert set(names(folder / "run-r1")) <= {"round-000000", "round-000001", "round-000002"}
    saved.save("r1", 2, a_checkpoint(3.0))
    assert value_of(Checkpoints(folder).latest("r1")) == 3.0


def test_a_failed_replacement_leaves_the_round_as_it_was(
    saved: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three renames fails: the first is taken back."""
    error = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing(Path.rename, error, 1))
        with pytest.raises(StoreFull):
            saved.save("r1", 1, a_checkpoint(9.0))
    assert value_of(saved.latest("r1")) == 2.0
    assert names(folder / "run-r1") == ["round-000000", "round-000001"]


def test_a_file_that_may_not_grow_is_a_full_disk(saved: Checkpoints, folder: Path) -> None:
    """Under a real limit of the system the library's own error becomes StoreFull, and the old checkpoints stay."""
    command = [sys.executable, "-c", SAVE_UNDER_A_LIMIT, str(folder)]
    writer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert writer.stdout.startswith("full: could not write "), writer.stderr
    assert names(folder / "run-r1") == ["round-000000", "round-000001"]
    assert value_of(saved.latest("r1")) == 2.0
