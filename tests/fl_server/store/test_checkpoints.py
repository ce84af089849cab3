"""Checkpoints: complete or absent, the newest valid one is used, and a full disk damages none."""

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

from fl_server.store import checkpoint_files, checkpoints
from fl_server.store.checkpoints import INITIAL, Checkpoint, Checkpoints
from fl_server.store.errors import NoCheckpoint, StoreError, StoreFull

SAVE_UNDER_A_LIMIT = """
import resource, signal, sys, torch
from fl_server.store.errors import StoreFull
from fl_server.store.checkpoints import Checkpoint, Checkpoints
saved = Checkpoints(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    saved.save("r1", 1, Checkpoint({"w": torch.zeros(100_000)}))
except StoreFull as error:
    print("full:", error)
"""
STEPS = [("mkdir", 0), ("save_file", 0), ("save_file", 1), ("write_bytes", 0), ("rename", 0)]
STEPS += [("fsync_path", at) for at in range(5)]
"""The calls of fsync are for model, memory, meta.json, the folder and its parent."""


def a_checkpoint(value: float = 1.0) -> Checkpoint:
    """A model of two tensors, not in the order of their names, and a momentum."""
    model = {"w": torch.full((2, 3), value), "b": torch.tensor([0.1 + value], dtype=torch.float64)}
    memory = {"Delta": {"w": torch.full((2, 3), -value)}}
    return Checkpoint(model, memory, {"seed": 7, "learning_rate": 0.1, "digests": ["x"]})


def value_of(checkpoint: Checkpoint | None) -> float | None:
    """The argument of `a_checkpoint`."""
    return None if checkpoint is None else float(checkpoint.model["w"][0, 0])


def stored(folder: Path, round: int) -> Checkpoint:
    """The checkpoint of run "r1" after a round."""
    name = "round-initial" if round == INITIAL else f"round-{round:06d}"
    return checkpoints._read(folder / "run-r1" / name)


def names(folder: Path) -> list[str]:
    """Names in a folder, sorted."""
    return sorted(each.name for each in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of the checkpoints."""
    return tmp_path / "checkpoints"


@pytest.fixture
def saved(folder: Path) -> Checkpoints:
    """Checkpoints of run "r1" for rounds 0 (value 1) and 1 (value 2)."""
    saved = Checkpoints(folder)
    for round in range(2):
        saved.save("r1", round, a_checkpoint(round + 1.0))
    return saved


def test_a_checkpoint_is_read_bit_for_bit(saved: Checkpoints, folder: Path) -> None:
    """Tensors with types and order, memory and facts; the facts have the round."""
    checkpoint, expected = stored(folder, 1), a_checkpoint(2.0)
    assert list(checkpoint.model) == ["w", "b"]
    assert all(torch.equal(checkpoint.model[name], tensor) for name, tensor in expected.model.items())
    assert checkpoint.model["b"].dtype == torch.float64
    assert torch.equal(checkpoint.memory["Delta"]["w"], expected.memory["Delta"]["w"])
    assert checkpoint.facts == {**expected.facts, "round": 1}


def test_the_latest_is_the_newest_round(saved: Checkpoints, folder: Path) -> None:
    """By number, also in a process that opens the directory again."""
    saved.save("r1", 10, a_checkpoint(11.0))
    assert value_of(Checkpoints(folder).latest("r1")) == 11.0
    assert saved.rounds("r1") == [0, 1, 10]


def test_a_run_without_checkpoints_has_no_latest(saved: Checkpoints) -> None:
    """An unknown run is no error."""
    assert saved.latest("r2") is None
    assert saved.rounds("r2") == []


def test_the_first_model_is_older_than_round_0(saved: Checkpoints, folder: Path) -> None:
    """The model before any round is kept as round -1."""
    saved.save("r1", INITIAL, a_checkpoint(0.5))
    assert saved.rounds("r1") == [-1, 0, 1]
    assert value_of(stored(folder, INITIAL)) == 0.5


@pytest.mark.parametrize("file", ["model.safetensors", "memory-Delta.safetensors", "meta.json"])
@pytest.mark.parametrize("damage", ["torn", "flipped", "gone"])
def test_the_newest_valid_checkpoint_is_used(saved: Checkpoints, folder: Path, file: str, damage: str) -> None:
    """A damaged newest checkpoint is logged and renamed, and the one before it is used."""
    path = folder / "run-r1" / "round-000001" / file
    content = path.read_bytes()
    torn = {"torn": content[:-3], "flipped": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]}
    path.write_bytes(torn[damage]) if damage in torn else path.unlink()
    with capture_logs() as logs:
        assert value_of(saved.latest("r1")) == 1.0
    assert [(log["event"], log["log_level"], log["round"]) for log in logs] == [("checkpoint_damaged", "warning", 1)]
    assert names(folder / "run-r1") == ["round-000000", "round-000001.damaged"]


def test_the_error_for_a_missing_round_lists_the_rounds(saved: Checkpoints) -> None:
    """The reader can choose another one."""
    with pytest.raises(NoCheckpoint, match="no model of round 7; there are: 0, 1"):
        saved.open_model("r1", 7)


def test_a_newer_format_is_not_treated_as_damaged(saved: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a newer program is refused with advice and stays unchanged."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "FORMAT", 2)
        saved.save("r1", 2, a_checkpoint())
    with pytest.raises(StoreError, match="checkpoint format 2; this program knows 1: start the version that wrote it"):
        saved.latest("r1")
    assert saved.rounds("r1") == [0, 1, 2]


def test_a_round_can_be_saved_again(saved: Checkpoints, folder: Path) -> None:
    """A round that is computed again after a crash replaces the first try."""
    saved.save("r1", 1, a_checkpoint(5.0))
    assert value_of(stored(folder, 1)) == 5.0
    assert names(folder / "run-r1") == ["round-000000", "round-000001"]


def test_the_model_file_is_plain_safetensors(saved: Checkpoints) -> None:
    """Other tools find the names of the state_dict in it, and nothing else."""
    with saved.open_model("r1", 0) as opened, safe_open(opened.name, framework="pt") as file:
        assert sorted(file.keys()) == ["b", "w"]
        assert torch.equal(file.get_tensor("w"), a_checkpoint(1.0).model["w"])


def test_an_open_model_can_be_read_after_its_checkpoint_is_removed(saved: Checkpoints) -> None:
    """An export that has begun is completed."""
    with saved.open_model("r1", 0) as file:
        content = Path(str(file.name)).read_bytes()
        saved.prune("r1", {1})
        assert file.read() == content


def test_loaded_tensors_do_not_depend_on_their_file(saved: Checkpoints, folder: Path) -> None:
    """A loaded model is a copy in memory: truncating the file does not change it."""
    checkpoint = stored(folder, 0)
    (folder / "run-r1" / "round-000000" / "model.safetensors").write_bytes(b"")
    assert value_of(checkpoint) == 1.0


def test_tensors_that_share_memory_are_saved(saved: Checkpoints, folder: Path) -> None:
    """Views of one flat buffer, tied weights and a transposed tensor are read with their values."""
    flat = torch.arange(6.0)
    model = {"a": flat[:2], "c": flat[2:], "tied": flat[:2], "t": torch.arange(6.0).reshape(2, 3).T}
    saved.save("r1", 2, Checkpoint(model))
    loaded = stored(folder, 2).model
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.items())


def test_facts_must_be_json(saved: Checkpoints) -> None:
    """A tensor among the facts is refused before a checkpoint is written."""
    with pytest.raises(StoreError, match="facts must be JSON values"):
        saved.save("r1", 2, Checkpoint({}, facts={"x": torch.zeros(1)}))
    assert saved.rounds("r1") == [0, 1]


def test_pruning_keeps_only_the_given_rounds(saved: Checkpoints, folder: Path) -> None:
    """All other rounds are removed."""
    saved.save("r1", 2, a_checkpoint())
    saved.prune("r1", {0, 2, 99})
    assert names(folder / "run-r1") == ["round-000000", "round-000002"]


def test_removing_a_run_keeps_the_others(saved: Checkpoints, folder: Path) -> None:
    """Removing twice is no error."""
    saved.save("r2", 0, a_checkpoint())
    saved.remove_run("r1")
    saved.remove_run("r1")
    assert names(folder) == ["run-r2"]


def test_opening_removes_leftovers(saved: Checkpoints, folder: Path) -> None:
    """An unfinished checkpoint of a killed process is removed; an unfinished replacement is undone."""
    run = folder / "run-r1"
    (run / ".part-round-000002").mkdir()
    (run / "round-000001").rename(run / ".replaced-round-000001")
    (run / ".replaced-round-000000").mkdir()
    assert Checkpoints(folder).rounds("r1") == [0, 1]
    assert names(run) == ["round-000000", "round-000001"]


@pytest.mark.parametrize("run_id", ["", "a/b", "x" * 65, "ü", "a\n"])
def test_a_run_id_cannot_leave_the_directory(saved: Checkpoints, run_id: str) -> None:
    """Ids are external input: only plain names are allowed."""
    with pytest.raises(StoreError, match="a run id must be 1 to 64 of the characters"):
        saved.save(run_id, 0, a_checkpoint())


def test_a_run_named_by_dots_stays_inside(saved: Checkpoints, folder: Path) -> None:
    """The id ".." has allowed characters, and its prefix makes it harmless."""
    saved.save("..", 0, a_checkpoint())
    assert names(folder) == ["run-..", "run-r1"]


def failing(original: Callable[..., object], error: OSError, at: int) -> Callable[..., object]:
    """The function, except that its call number `at`, counted from 0, raises."""
    calls = iter(range(1_000))

    def call(*args: object, **kwargs: object) -> object:
        if next(calls) == at:
            raise error
        return original(*args, **kwargs)

    return call


def break_step(patch: pytest.MonkeyPatch, step: str, error: OSError, at: int) -> None:
    """Let call number `at` of one step of `save` fail, in every module that calls it."""
    places: list[object] = [each for each in (checkpoint_files, checkpoints) if hasattr(each, step)] or [Path]
    broken = failing(getattr(places[0], step), error, at)
    for place in places:
        patch.setattr(place, step, broken)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=["full", "read-only", "forbidden"])
@pytest.mark.parametrize(("step", "at"), STEPS)
def test_a_full_disk_at_any_step_damages_nothing(
    saved: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int, at: int
) -> None:
    """The error is StoreFull, older rounds stay, no unfinished checkpoint is visible, and a retry works."""
    with monkeypatch.context() as patch:
        break_step(patch, step, OSError(code, os.strerror(code)), at)
        with pytest.raises(StoreFull, match=os.strerror(code)):
            saved.save("r1", 2, a_checkpoint(3.0))
    assert value_of(stored(folder, 1)) == 2.0
    assert set(names(folder / "run-r1")) <= {"round-000000", "round-000001", "round-000002"}
    saved.save("r1", 2, a_checkpoint(3.0))
    assert value_of(Checkpoints(folder).latest("r1")) == 3.0


def test_a_failed_replacement_leaves_the_round_as_it_was(
    saved: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three renames fails: the first one is undone."""
    error = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing(Path.rename, error, 1))
        with pytest.raises(StoreFull):
            saved.save("r1", 1, a_checkpoint(9.0))
    assert value_of(saved.latest("r1")) == 2.0
    assert names(folder / "run-r1") == ["round-000000", "round-000001"]


@pytest.mark.slow
def test_the_systems_file_size_limit_is_store_full(saved: Checkpoints, folder: Path) -> None:
    """With a real limit of the system the library's error becomes StoreFull, and the old checkpoints stay."""
    command = [sys.executable, "-c", SAVE_UNDER_A_LIMIT, str(folder)]
    writer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert writer.stdout.startswith("full: could not write "), writer.stderr
    assert names(folder / "run-r1") == ["round-000000", "round-000001"]
    assert value_of(saved.latest("r1")) == 2.0
