"""A daemon whose device loses its power: identity, shard, updates and client states are there as they were used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from fl_client.errors import StateError, WorkFailed
from fl_client.shelf import Shelf
from fl_client.state import StateDir
from tests.fl_client.shelves import assignment, key, leaves, outcome, state, update
from tests.power.drives import ALL, Cut, Rest, Tree, after_each, put
from tests.power.recorder import Operation, Recorder, Synced, renames

CLIP = 0.5
COUNTS = {1: True, 2: True, 3: False, 4: True}
"""The rounds of the run, and whether the device's update counts."""
PLAIN = "plain"
"""A run whose clients keep no state."""
HOWS = {
    "nothing-more": Cut(),
    "names-without-content": Cut(names=Rest.KEPT),
    "all-that-was-written": Cut(Rest.KEPT, Rest.KEPT),
    **{f"drawn-{seed}": Cut(Rest.DRAWN, Rest.DRAWN, seed=seed) for seed in range(1, 9)},
}


@dataclass(frozen=True, slots=True)
class Said:
    """What the coordinator knows of the device."""

    shard: Sequence[int] = ()
    """What it trained on."""
    counted: int = 0
    """The round whose update is the last that is known to count."""
    sent: int = 0
    """A round whose update may count, for it was sent; 0 for none."""


def live(recorder: Recorder, said: Said, rounds: Iterable[int]) -> list[Operation]:
    """All that is done to the state directory in these rounds, with a start of the daemon in each."""
    with recorder.recording():
        for round_ in rounds:
            with StateDir(recorder.folder / "state") as here:
                said = replace(said, shard=identify(here, [round_]))
                shelf = Shelf(here.pending, here.states)
                if key(round_) not in shelf.unsettled():  # else it was made before, and is sent as it is
                    shelf.keep(update(round_), leaves(round_))
                recorder.tell(said := replace(said, sent=round_))
                shelf.keep(update(round_, run_id=PLAIN), None)
                recorder.tell(said := replace(said, sent=0, counted=round_ if COUNTS[round_] else said.counted))
                shelf.settle(outcome(round_, counted=COUNTS[round_], clip_factor=CLIP))
    return recorder.record


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> list[Operation]:
    """Of a device that nothing happens to."""
    return live(Recorder(tmp_path_factory.mktemp("device")), Said(), COUNTS)


def identify(here: StateDir, made: list[int]) -> list[int]:
    """The device's shard, once the directory is known to be its own."""
    here.claim("edge-1")
    return here.shard({"seed": 1}, lambda: made) or []


def check(tree: Tree, folder: Path, said: Said, counted: int) -> None:
    """Start a daemon on what is left, and give it the round after the one that counted last."""
    put(tree, folder)
    wanted = outcome(counted, clip_factor=CLIP) if counted else None
    with StateDir(folder / "state") as here:
        shard = identify(here, [99])
        assert not said.shard or shard == said.shard
        shelf = Shelf(here.pending, here.states)
        work = assignment(len(COUNTS) + 1, wanted)
        assert shelf.resume(work) is None
        kept = shelf.state_for(work)
        for round_ in COUNTS:
            plain = shelf.resume(assignment(round_, run_id=PLAIN))
            whole = b"".join(update(round_).pieces)
            assert plain is None or plain.read(0, len(whole)) == whole
    assert (kept is None) is (not counted)
    if kept is not None:
        name = "layer/0.weight"
        assert torch.equal(kept["c_i"][name], state(10 * CLIP * counted)["c_i"][name])


def check_all(record: Sequence[Operation], how: Cut, folder: Path, first: int = 0) -> None:
    """Cut after every operation; an update that was sent, and of which no more is known, may count or not."""
    for at, drive in enumerate(after_each(record)):
        if at < first:
            continue
        said = drive.told or Said()
        for counted in {said.counted, said.sent or said.counted}:
            check(drive.cut(replace(how, seed=1000 * how.seed + at)), folder / f"{at}-{counted}", said, counted)


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_a_cut_after_any_operation_leaves_the_state_that_counted(tmp_path, record, how):
    """The daemon starts, has its shard, and works from the state of the update that counted last.

    Of an update that leaves no state all is there or nothing.
    """
    check_all(record, how, tmp_path)


def killed(record: Sequence[Operation], at: int, folder: Path) -> list[Operation]:
    """The same device, but its daemon was killed after operation number `at`, and another one did the last round."""
    *_, drive = after_each(record[:at])
    put(drive.cut(ALL), folder)
    recorder = Recorder(folder)
    recorder.adopt(drive.paths(), record[:at])
    *_, last = COUNTS
    return live(recorder, replace(drive.told or Said(), sent=0), [last])


def test_what_a_killed_daemon_left_unsynced_is_synced_by_the_next(tmp_path, record):
    """Between a rename and its sync: the next daemon goes by the name that it finds, and so it must last."""
    for at in renames(record)[-4:]:
        check_all(killed(record, at, tmp_path / f"killed-{at}"), HOWS["nothing-more"], tmp_path / f"after-{at}", at + 1)


@pytest.mark.parametrize(("how", "folders"), [("nothing-more", True), ("names-without-content", False)])
def test_a_sync_that_is_missing_is_found_out(tmp_path, record, how, folders):
    """The same daemon, but no folder is synced, or no file: then what it needs is gone after some cut."""
    less = [each for each in record if not (isinstance(each, Synced) and each.node.is_folder is folders)]
    assert len(less) < len(record)
    with pytest.raises((AssertionError, StateError, WorkFailed)):
        check_all(less, HOWS[how], tmp_path)
