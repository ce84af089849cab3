"""Client states on disk: only counted updates change them, and they are never confused."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from algorithms.base import Memory
from fl_client.errors import WorkFailed
from fl_client.storage.pending_updates import MAX_KEPT, key_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2
from tests.fl_client.storages import assignment, key, leaves, outcome, state, storage, update


def after(folder: Path, round_number: int, counted: training_pb2.Outcome | None, epoch: int = 0) -> Memory | None:
    """The state that a restarted daemon uses."""
    found = storage(folder)
    wanted = assignment(round_number, counted, epoch)
    assert found.resume(wanted) is None
    return found.state_for(wanted)


def same(got: Memory | None, expected: Memory) -> bool:
    """Equal bits under the same symbols and names."""
    assert got is not None
    return flat(got).keys() == flat(expected).keys() and all(
        torch.equal(tensor, flat(expected)[name]) for name, tensor in flat(got).items()
    )


def flat(memory: Memory) -> dict[tuple[str, str], torch.Tensor]:
    """Tensors by symbol and name."""
    return {(symbol, name): tensor for symbol, named in memory.items() for name, tensor in named.items()}


def test_an_update_that_counted_leaves_its_state(tmp_path: Path) -> None:
    """The settled state of round 1 is found, also after a restart."""
    kept = storage(tmp_path)
    kept.save(update(1), leaves(1))
    kept.settle(outcome(1))
    assert kept.pending_keys() == []
    assert same(after(tmp_path, 2, outcome(1)), state(10))


def test_the_next_assignment_replaces_a_missed_outcome(tmp_path: Path) -> None:
    """The daemon was away when round 1 committed: the assignment of round 4 has its outcome."""
    storage(tmp_path).save(update(1), leaves(1))
    assert same(after(tmp_path, 4, outcome(1)), state(10))


def test_the_state_is_that_of_the_clipped_delta(tmp_path: Path) -> None:
    """Between 0 and 10 a quarter is 2.5."""
    storage(tmp_path).save(update(1), leaves(1))
    assert same(after(tmp_path, 2, outcome(1, clip_factor=0.25)), state(2.5))


@pytest.mark.parametrize(
    "other",
    [{"counted": False}, {"digest": update(7).header.digest}, {"digest": None}],
    ids=["not counted", "another update", "none"],
)
def test_an_uncounted_update_leaves_nothing(tmp_path: Path, other: Any) -> None:
    """The state of round 1 stays as it was, and the update of round 2 is gone."""
    kept = storage(tmp_path)
    kept.save(update(1), leaves(1))
    kept.settle(outcome(1))
    kept.save(update(2), leaves(2))
    kept.settle(outcome(2, **other))
    assert kept.pending_keys() == []
    assert same(after(tmp_path, 3, outcome(1)), state(10))


def test_an_uncounted_update_of_an_earlier_round_is_removed(tmp_path: Path) -> None:
    """Round 3's assignment still names round 1, so the update of round 2 never counts. Another run's stays."""
    kept = storage(tmp_path)
    for number in (1, 2):
        kept.save(update(number), leaves(number))
    kept.save(update(2, run_id="other"), leaves(2))
    assert same(after(tmp_path, 3, outcome(1)), state(10))
    assert [key_of(it) for it in kept.pending_keys()] == [("other", 2, 0)]


def test_the_same_outcome_again_changes_nothing(tmp_path: Path) -> None:
    """The stream, the registration and the next assignment repeat the outcome: the state stays."""
    kept = storage(tmp_path)
    kept.save(update(1), leaves(1))
    for _ in range(3):
        kept.settle(outcome(1))
    assert same(after(tmp_path, 2, outcome(1)), state(10))


def test_an_old_outcome_does_not_bring_an_old_state_back(tmp_path: Path) -> None:
    """Round 1's outcome arrives after that of round 2."""
    kept = storage(tmp_path)
    for number in (1, 2):
        kept.save(update(number), leaves(number))
    kept.settle(outcome(2))
    kept.settle(outcome(1))
    assert same(after(tmp_path, 3, outcome(2)), state(20))


def test_states_of_another_epoch_are_discarded(tmp_path: Path) -> None:
    """In epoch 1 nothing has counted yet: the states start again, and round 1 of that epoch replaces the old state."""
    kept = storage(tmp_path)
    kept.save(update(5), leaves(5))
    kept.settle(outcome(5))
    assert after(tmp_path, 1, None, epoch=1) is None
    kept.save(update(1, epoch=1), leaves(1))
    kept.settle(outcome(1, epoch=1))
    assert kept.held_states() == [pb.HeldState(run_id="run", state_epoch=1)]
    assert same(after(tmp_path, 2, outcome(1, epoch=1), epoch=1), state(10))


def test_an_update_for_another_epoch_is_not_sent_again(tmp_path: Path) -> None:
    """The round was restarted with new states: an update from the old state is other work."""
    kept = storage(tmp_path)
    kept.save(update(3), leaves(3))
    assert kept.resume(assignment(3)) is not None
    assert kept.resume(assignment(3, epoch=1)) is None
    assert kept.pending_keys() == []


@pytest.mark.parametrize(
    "asked",
    [outcome(2), outcome(1, digest=update(7).header.digest), outcome(1, epoch=1)],
    ids=["round", "digest", "epoch"],
)
def test_a_state_other_than_the_requested_one_is_lost(tmp_path: Path, asked: Any) -> None:
    """Round, digest and epoch must be those of the last counted update."""
    kept = storage(tmp_path)
    kept.save(update(1), leaves(1))
    kept.settle(outcome(1))
    with pytest.raises(WorkFailed, match="got that of update .* of round 1 in epoch 0") as failed:
        after(tmp_path, 3, asked, epoch=asked.state_epoch)
    assert failed.value.reason == pb.FAILURE_REASON_STATE_LOST


def test_a_missing_state_is_lost(tmp_path: Path) -> None:
    """The state directory is empty although a round counted."""
    with pytest.raises(WorkFailed, match="of run run, got none") as failed:
        after(tmp_path, 2, outcome(1))
    assert failed.value.reason == pb.FAILURE_REASON_STATE_LOST


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other run"])
def test_an_incomplete_or_foreign_file_is_lost(tmp_path: Path, damage: str) -> None:
    """The log names the file, and the coordinator gets STATE_LOST."""
    kept = storage(tmp_path)
    for run_id in ("run", "other"):
        kept.save(update(1, run_id=run_id), leaves(1))
        kept.settle(outcome(1, run_id=run_id))
    whole = {len(path.read_bytes()): path for path in (tmp_path / "states").iterdir()}
    mine, theirs = whole[min(whole)], whole[max(whole)]  # "run" is shorter than "other"
    data = {"cut": mine.read_bytes()[:-1], "changed": mine.read_bytes()[:-1] + b"9", "empty": b""}
    mine.write_bytes(data.get(damage, theirs.read_bytes()))
    with capture_logs() as logs, pytest.raises(WorkFailed) as failed:
        after(tmp_path, 2, outcome(1))
    assert failed.value.reason == pb.FAILURE_REASON_STATE_LOST
    assert damage == "other run" or [line["event"] for line in logs] == ["state_unreadable"]


def test_a_damaged_next_state_removes_its_update(tmp_path: Path) -> None:
    """The update is not sent again without its next state. If it has counted, the state is lost."""
    kept = storage(tmp_path)
    kept.save(update(1), leaves(1))
    (path,) = (tmp_path / "pending").iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"9")
    with capture_logs() as logs, pytest.raises(WorkFailed):
        after(tmp_path, 2, outcome(1))
    assert [line["event"] for line in logs] == ["state_unreadable"]
    kept.save(update(1), leaves(1))
    path.write_bytes(path.read_bytes()[:-1] + b"9")
    assert kept.resume(assignment(1)) is None


def test_updates_with_a_state_are_not_evicted(tmp_path: Path) -> None:
    """With too many updates of runs without states, their oldest are removed and the one with a state stays."""
    kept = storage(tmp_path)
    kept.save(update(1), leaves(1))
    for number in range(MAX_KEPT + 2):
        kept.save(update(number, run_id="plain"), None)
    rounds = [(it.run_id, it.round) for it in kept.pending_keys()]
    assert rounds == [("run", 1), *(("plain", number) for number in range(2, MAX_KEPT + 2))]


def test_the_end_of_a_run_removes_its_files(tmp_path: Path) -> None:
    """State and updates of the run are removed. Another run's stay."""
    kept = storage(tmp_path)
    for run_id in ("run", "other"):
        kept.save(update(1, run_id=run_id), leaves(1))
        kept.settle(outcome(1, run_id=run_id))
        kept.save(update(2, run_id=run_id), leaves(2))
    kept.end_run("run")
    assert kept.held_states() == [pb.HeldState(run_id="other")]
    assert kept.pending_keys() == [key(2, "other")]


def test_a_run_is_registered_from_its_first_update_on(tmp_path: Path) -> None:
    """A registration names a run with only a pending update and its next state, so that the run's end arrives."""
    kept = storage(tmp_path)
    kept.save(update(1, epoch=3), leaves(1))
    kept.save(update(1, run_id="plain"), None)
    assert kept.held_states() == [pb.HeldState(run_id="run", state_epoch=3)]


def test_a_round_s_earlier_exchanges_are_over_with_its_last(tmp_path: Path) -> None:
    """An outcome of exchange 1 settles the files of exchange 0 of that round, and of no other round."""
    kept = storage(tmp_path)
    for exchange in (0, 1):
        kept.save(update(1, exchange=exchange), None)
    kept.save(update(2), None)
    kept.settle(outcome(1, key=key(1, exchange=1)))
    assert kept.pending_keys() == [key(2)]


def test_a_full_disk_keeps_the_update_until_the_state_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome is settled again once the disk has space. Then the state is written."""
    kept = storage(tmp_path)
    kept.save(update(1), leaves(1))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            kept.settle(outcome(1))
    assert kept.pending_keys() == [key(1)]
    assert not list((tmp_path / "states").iterdir())
    assert same(after(tmp_path, 2, outcome(1)), state(10))
