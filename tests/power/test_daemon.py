"""A device keeps the identity, shard, updates and client states of its daemon after a power cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from fl_client.errors import StateError, WorkFailed
from fl_client.storage.device_storage import DeviceStorage
from fl_client.storage.state import StateDir
from tests.fl_client.storages import assignment, key, leaves, outcome, state, update
from tests.marks import slow_except
from tests.power.drives import ALL, Cut, Tree, Unsynced, after_each, put
from tests.power.recorder import Operation, Recorder, Synced, renames

CLIP = 0.5
COUNTS = {1: True, 2: True, 3: False, 4: True}
"""Round of the run -> whether the device's update counts."""
PLAIN = "plain"
"""Id of a run without client states."""
CUTS = {
    "nothing-more": Cut(),
    "names-without-content": Cut(names=Unsynced.KEPT),
    "all-that-was-written": Cut(Unsynced.KEPT, Unsynced.KEPT),
    **{f"drawn-{seed}": Cut(Unsynced.DRAWN, Unsynced.DRAWN, seed=seed) for seed in range(1, 9)},
}


@dataclass(frozen=True, slots=True)
class ServerView:
    """The coordinator's knowledge of the device."""

    shard: Sequence[int] = ()
    """The indices of the shard."""
    counted: int = 0
    """The latest round with an update that is known to count."""
    sent: int = 0
    """The round of a sent update, which may count; 0 for none."""


def record_rounds(recorder: Recorder, view: ServerView, rounds: Iterable[int]) -> list[Operation]:
    """Operations on the state directory in these rounds, with a start of the daemon in each."""
    with recorder.recording():
        for round_ in rounds:
            with StateDir(recorder.folder / "state") as here:
                view = replace(view, shard=identify(here, [round_]))
                storage = DeviceStorage(here.pending, here.states)
                if key(round_) not in storage.pending_keys():  # otherwise the stored update is sent
                    storage.save(update(round_), leaves(round_))
                recorder.report(view := replace(view, sent=round_))
                storage.save(update(round_, run_id=PLAIN), None)
                recorder.report(view := replace(view, sent=0, counted=round_ if COUNTS[round_] else view.counted))
                storage.settle(outcome(round_, counted=COUNTS[round_], clip_factor=CLIP))
    return recorder.record


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> list[Operation]:
    """The record of a device without faults."""
    return record_rounds(Recorder(tmp_path_factory.mktemp("device")), ServerView(), COUNTS)


def identify(here: StateDir, made: list[int]) -> list[int]:
    """Claim the directory for the device; returns its shard."""
    here.claim("edge-1")
    return here.shard({"seed": 1}, lambda: made) or []


def check(tree: Tree, folder: Path, view: ServerView, counted: int) -> None:
    """Start a daemon on the kept files and give it the round after the last counted one."""
    put(tree, folder)
    wanted = outcome(counted, clip_factor=CLIP) if counted else None
    with StateDir(folder / "state") as here:
        shard = identify(here, [99])
        assert not view.shard or shard == view.shard
        storage = DeviceStorage(here.pending, here.states)
        work = assignment(len(COUNTS) + 1, wanted)
        assert storage.resume(work) is None
        kept = storage.state_for(work)
        for round_ in COUNTS:
            plain = storage.resume(assignment(round_, run_id=PLAIN))
            whole = b"".join(update(round_).pieces)
            assert plain is None or plain.read(0, len(whole)) == whole
    assert (kept is None) is (not counted)
    if kept is not None:
        name = "layer/0.weight"
        assert torch.equal(kept["c_i"][name], state(10 * CLIP * counted)["c_i"][name])


def check_all(record: Sequence[Operation], how: Cut, folder: Path, first: int = 0) -> None:
    """Cut after every operation. A sent update without a known outcome may count or not."""
    assert first < len(record), f"expected operations after the first {first}, got {len(record)}"
    for at, drive in enumerate(after_each(record)):
        if at < first:
            continue
        view = drive.reported or ServerView()
        for counted in {view.counted, view.sent or view.counted}:
            check(drive.cut(replace(how, seed=1000 * how.seed + at)), folder / f"{at}-{counted}", view, counted)


@pytest.mark.parametrize("how", slow_except(CUTS.values(), CUTS["all-that-was-written"], CUTS["drawn-1"]), ids=CUTS)
def test_a_cut_after_any_operation_leaves_the_state_that_counted(
    tmp_path: Path, record: Sequence[Operation], how: Cut
) -> None:
    """The daemon starts, has its shard, and uses the state of the last counted update.

    An update without a state is complete or absent.
    """
    check_all(record, how, tmp_path)


def killed(record: Sequence[Operation], at: int, folder: Path) -> list[Operation]:
    """The record of a daemon that is killed after operation `at`, and of another one in the last round."""
    *_, drive = after_each(record[:at])
    put(drive.cut(ALL), folder)
    recorder = Recorder(folder)
    recorder.adopt(drive.paths(), record[:at])
    *_, last = COUNTS
    return record_rounds(recorder, replace(drive.reported or ServerView(), sent=0), [last])


def test_unsynced_names_of_a_killed_daemon_are_synced_by_the_next(tmp_path: Path, record: Sequence[Operation]) -> None:
    """The daemon is killed between a rename and its sync. The next one uses the name, so it must be durable."""
    for at in renames(record)[-4:]:
        check_all(killed(record, at, tmp_path / f"killed-{at}"), CUTS["nothing-more"], tmp_path / f"after-{at}", at + 1)


@pytest.mark.parametrize(("how", "folders"), [("nothing-more", True), ("names-without-content", False)])
def test_a_missing_sync_is_found(tmp_path: Path, record: Sequence[Operation], how: str, folders: bool) -> None:
    """Without syncs of folders or files, the daemon misses something that it needs after some cut."""
    less = [each for each in record if not (isinstance(each, Synced) and each.node.is_folder is folders)]
    assert len(less) < len(record)
    with pytest.raises((AssertionError, StateError, WorkFailed)):
        check_all(less, CUTS[how], tmp_path)
