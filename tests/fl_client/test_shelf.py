"""Client states on disk: promoted by what counted and by nothing else, and never taken for one another."""

from __future__ import annotations

import errno

import pytest
import torch
from structlog.testing import capture_logs

from fl_client.errors import WorkFailed
from fl_client.updates import KEPT, key_of
from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_client.shelves import assignment, key, leaves, outcome, shelf, state, update


def after(folder, round_number, counted, epoch=0):
    """The state that a daemon just started works from."""
    found = shelf(folder)
    wanted = assignment(round_number, counted, epoch)
    assert found.resume(wanted) is None
    return found.state_for(wanted)


def same(got, expected):
    """Equal bits under the same symbols and names."""
    return flat(got).keys() == flat(expected).keys() and all(
        torch.equal(tensor, flat(expected)[name]) for name, tensor in flat(got).items()
    )


def flat(memory):
    """Tensors by symbol and name."""
    return {(symbol, name): tensor for symbol, named in memory.items() for name, tensor in named.items()}


def test_an_update_that_counted_leaves_its_state(tmp_path):
    """Kept, settled, asked for: the state of round 1, after a restart too."""
    kept = shelf(tmp_path)
    kept.keep(update(1), leaves(1))
    kept.settle(outcome(1))
    assert kept.unsettled() == []
    assert same(after(tmp_path, 2, outcome(1)), state(10))


def test_a_missed_outcome_is_made_up_by_the_next_assignment(tmp_path):
    """The daemon was away when round 1 committed: the assignment of round 4 says that it counted."""
    shelf(tmp_path).keep(update(1), leaves(1))
    assert same(after(tmp_path, 4, outcome(1)), state(10))


def test_the_state_is_that_of_the_clipped_delta(tmp_path):
    """Between 0 and 10 a quarter is 2.5."""
    shelf(tmp_path).keep(update(1), leaves(1))
    assert same(after(tmp_path, 2, outcome(1, clip_factor=0.25)), state(2.5))


@pytest.mark.parametrize(
    "other",
    [{"counted": False}, {"digest": update(7).header.digest}, {"digest": None}],
    ids=["not counted", "another update", "none"],
)
def test_what_did_not_count_leaves_nothing(tmp_path, other):
    """The state of round 1 stays as it was, and the update of round 2 is gone."""
    kept = shelf(tmp_path)
    kept.keep(update(1), leaves(1))
    kept.settle(outcome(1))
    kept.keep(update(2), leaves(2))
    kept.settle(outcome(2, **other))
    assert kept.unsettled() == []
    assert same(after(tmp_path, 3, outcome(1)), state(10))


def test_what_had_not_counted_when_a_later_round_began_goes(tmp_path):
    """Round 3's assignment still names round 1, so the update of round 2 will never count; another run's stays."""
    kept = shelf(tmp_path)
    for number in (1, 2):
        kept.keep(update(number), leaves(number))
    kept.keep(update(2, run_id="other"), leaves(2))
    assert same(after(tmp_path, 3, outcome(1)), state(10))
    assert [key_of(it) for it in kept.unsettled()] == [("other", 2, 0)]


def test_the_same_outcome_again_changes_nothing(tmp_path):
    """Told by the stream, by registration and by the next assignment: one state."""
    kept = shelf(tmp_path)
    kept.keep(update(1), leaves(1))
    for _ in range(3):
        kept.settle(outcome(1))
    assert same(after(tmp_path, 2, outcome(1)), state(10))


def test_an_old_outcome_does_not_bring_an_old_state_back(tmp_path):
    """Round 1's outcome comes after that of round 2."""
    kept = shelf(tmp_path)
    for number in (1, 2):
        kept.keep(update(number), leaves(number))
    kept.settle(outcome(2))
    kept.settle(outcome(1))
    assert same(after(tmp_path, 3, outcome(2)), state(20))


def test_states_of_another_epoch_are_void(tmp_path):
    """In epoch 1 nothing has counted yet: the work begins anew, and round 1 of that epoch takes the old one's place."""
    kept = shelf(tmp_path)
    kept.keep(update(5), leaves(5))
    kept.settle(outcome(5))
    assert after(tmp_path, 1, None, epoch=1) is None
    kept.keep(update(1, epoch=1), leaves(1))
    kept.settle(outcome(1, epoch=1))
    assert kept.held() == [pb.HeldState(run_id="run", state_epoch=1)]
    assert same(after(tmp_path, 2, outcome(1, epoch=1), epoch=1), state(10))


def test_an_update_for_another_epoch_is_not_sent_again(tmp_path):
    """The round began anew with new states: the update that was made from the old one answers other work."""
    kept = shelf(tmp_path)
    kept.keep(update(3), leaves(3))
    assert kept.resume(assignment(3)) is not None
    assert kept.resume(assignment(3, epoch=1)) is None
    assert kept.unsettled() == []


@pytest.mark.parametrize(
    "asked",
    [outcome(2), outcome(1, digest=update(7).header.digest), outcome(1, epoch=1)],
    ids=["round", "digest", "epoch"],
)
def test_a_state_other_than_the_one_asked_for_is_lost(tmp_path, asked):
    """Round, digest and epoch must all be those of the update that counted last."""
    kept = shelf(tmp_path)
    kept.keep(update(1), leaves(1))
    kept.settle(outcome(1))
    with pytest.raises(WorkFailed, match="got that of update .* of round 1 in epoch 0") as failed:
        after(tmp_path, 3, asked, epoch=asked.state_epoch)
    assert failed.value.reason == pb.FAILURE_REASON_STATE_LOST


def test_a_state_that_is_not_here_is_lost(tmp_path):
    """An empty state directory, and a round that counted."""
    with pytest.raises(WorkFailed, match="left, got none") as failed:
        after(tmp_path, 2, outcome(1))
    assert failed.value.reason == pb.FAILURE_REASON_STATE_LOST


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other run"])
def test_a_file_that_is_not_whole_or_not_ours_is_lost(tmp_path, damage):
    """A line in the log says which file, and the coordinator hears that the state is lost."""
    kept = shelf(tmp_path)
    for run_id in ("run", "other"):
        kept.keep(update(1, run_id=run_id), leaves(1))
        kept.settle(outcome(1, run_id=run_id))
    whole = {len(path.read_bytes()): path for path in (tmp_path / "states").iterdir()}
    mine, theirs = whole[min(whole)], whole[max(whole)]  # "run" is shorter than "other"
    data = {"cut": mine.read_bytes()[:-1], "changed": mine.read_bytes()[:-1] + b"9", "empty": b""}
    mine.write_bytes(data.get(damage, theirs.read_bytes()))
    with capture_logs() as logs, pytest.raises(WorkFailed) as failed:
        after(tmp_path, 2, outcome(1))
    assert failed.value.reason == pb.FAILURE_REASON_STATE_LOST
    assert damage == "other run" or [line["event"] for line in logs] == ["state_unreadable"]


def test_a_damaged_next_state_takes_its_update_along(tmp_path):
    """The update is not sent again without the state that it would leave; told that it counted, the state is lost."""
    kept = shelf(tmp_path)
    kept.keep(update(1), leaves(1))
    (path,) = (tmp_path / "pending").iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"9")
    with capture_logs() as logs, pytest.raises(WorkFailed):
        after(tmp_path, 2, outcome(1))
    assert [line["event"] for line in logs] == ["state_unreadable"]
    kept.keep(update(1), leaves(1))
    path.write_bytes(path.read_bytes()[:-1] + b"9")
    assert kept.resume(assignment(1)) is None


def test_updates_that_leave_a_state_are_not_pushed_out(tmp_path):
    """More updates than are kept, of runs without states: the oldest of those go, the one with a state stays."""
    kept = shelf(tmp_path)
    kept.keep(update(1), leaves(1))
    for number in range(KEPT + 2):
        kept.keep(update(number, run_id="plain"), None)
    rounds = [(it.run_id, it.round) for it in kept.unsettled()]
    assert rounds == [("run", 1), *(("plain", number) for number in range(2, KEPT + 2))]


def test_the_end_of_a_run_takes_all_that_is_kept_for_it(tmp_path):
    """State and updates of the run go; another run's stay."""
    kept = shelf(tmp_path)
    for run_id in ("run", "other"):
        kept.keep(update(1, run_id=run_id), leaves(1))
        kept.settle(outcome(1, run_id=run_id))
        kept.keep(update(2, run_id=run_id), leaves(2))
    kept.end("run")
    assert kept.held() == [pb.HeldState(run_id="other")]
    assert kept.unsettled() == [key(2, "other")]


def test_a_run_is_held_from_its_first_update_on(tmp_path):
    """Registration names a run whose only trace is an update that leaves a state, so that its end can be heard of."""
    kept = shelf(tmp_path)
    kept.keep(update(1, epoch=3), leaves(1))
    kept.keep(update(1, run_id="plain"), None)
    assert kept.held() == [pb.HeldState(run_id="run", state_epoch=3)]


def test_a_round_s_earlier_exchanges_are_over_with_its_last(tmp_path):
    """An outcome of exchange 1 settles what was kept for exchange 0 of that round, and no other round's."""
    kept = shelf(tmp_path)
    for exchange in (0, 1):
        kept.keep(update(1, exchange=exchange), None)
    kept.keep(update(2), None)
    kept.settle(outcome(1, key=key(1, exchange=1)))
    assert kept.unsettled() == [key(2)]


def test_a_full_disk_keeps_the_update_until_the_state_is_written(tmp_path, monkeypatch):
    """The outcome is settled again when there is room: the state comes to be then."""
    kept = shelf(tmp_path)
    kept.keep(update(1), leaves(1))

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            kept.settle(outcome(1))
    assert kept.unsettled() == [key(1)]
    assert not list((tmp_path / "states").iterdir())
    assert same(after(tmp_path, 2, outcome(1)), state(10))
