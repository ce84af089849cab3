"""A coordinator that loses power after any operation on its state directory and continues with the kept files.

It starts, knows every reported commit, and ends the run with the models, lists and counters of the run without faults.
With durability "power" no update with a receipt is sent again. With "process" one may be, and no torn update counts.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from fl_server.store.errors import StoreError
from tests.marks import slow_except
from tests.power.drives import Cut, Unsynced
from tests.power.recorded_runs import CrashImage, Job, RecordedRun
from tests.power.recorder import Committed, Named, Operation, Synced, renames

METHODS = {
    "fedcm": Job("process"),
    "scaffold": Job("process", {"algorithm": {"name": "scaffold"}, "population": 3, "stop": {"rounds": 3}}),
    "mime": Job("process", {"algorithm": {"name": "mime"}}, exchanges=2),
}
JOBS = {
    f"{durability}-{name}": replace(job, durability=durability)
    for name, job in METHODS.items()
    for durability in ("process", "power")
}
NOTHING_MORE = Cut()
CUTS = {
    "nothing-more": NOTHING_MORE,
    "names-without-content": Cut(names=Unsynced.KEPT),
    "files-ahead-of-the-ledger": Cut(Unsynced.KEPT, Unsynced.KEPT, Unsynced.LOST),
    "ledger-ahead-of-the-files": Cut(Unsynced.LOST, Unsynced.LOST, Unsynced.KEPT),
    **{f"drawn-{seed}": Cut(Unsynced.DRAWN, Unsynced.DRAWN, Unsynced.DRAWN, seed) for seed in (1, 2)},
}
SPREAD = 2
"""Number of cuts of each kind and job in the fast tests. The slow tests try all."""


@pytest.fixture(scope="session")
def recorded_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RecordedRun]:
    """The recorded run of each job without faults, executed on the first call."""
    return functools.cache(lambda name: RecordedRun.of(JOBS[name], tmp_path_factory.mktemp("run")))


def recover_all(crash_images: Sequence[CrashImage], folder: Path) -> None:
    """Recover each image in its own folder; a failure names the image."""
    assert crash_images, "expected images to recover, got none"
    for image in crash_images:
        try:
            asyncio.run(image.recover(folder / f"{image.at}"))
        except BaseException as error:
            error.add_note(str(image))
            raise


@pytest.mark.parametrize(
    ("job", "how"),
    slow_except(
        [*(("power-fedcm", how) for how in CUTS), *(("process-scaffold", how) for how in ("nothing-more", "drawn-1"))],
        *(("power-fedcm", how) for how in ("nothing-more", "files-ahead-of-the-ledger")),
    ),
)
def test_a_cut_of_the_power_changes_nothing(
    tmp_path: Path, recorded_runs: Callable[[str], RecordedRun], job: str, how: str
) -> None:
    """A random few of the cuts, different for each kind."""
    crash_images = recorded_runs(job).crash_images(CUTS[how])
    recover_all(Random(how).sample(crash_images, min(SPREAD, len(crash_images))), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("job", JOBS)
def test_a_cut_of_the_power_after_any_operation_changes_nothing(
    tmp_path: Path, recorded_runs: Callable[[str], RecordedRun], job: str, how: str
) -> None:
    """All cuts."""
    recover_all(recorded_runs(job).crash_images(CUTS[how]), tmp_path)


def cut_after_kill(run: RecordedRun, at: int, cuts: int, folder: Path) -> None:
    """Kill the coordinator after an operation, start another, and cut its power after its first operations."""
    crash_images = run.killed(at, folder / f"killed-{at}").crash_images(NOTHING_MORE)
    recover_all(crash_images[:cuts], folder / f"after-{at}")


def renamed(run: RecordedRun, at: int) -> Iterable[str]:
    """The names that operation `at` changes."""
    operation = run.record[at]
    assert isinstance(operation, Named)
    return operation.changes


@pytest.mark.slow
@pytest.mark.parametrize("name", [".update", "round-000000"])
def test_unsynced_names_of_a_killed_coordinator_are_synced_by_the_next(
    tmp_path: Path, recorded_runs: Callable[[str], RecordedRun], name: str
) -> None:
    """The coordinator was killed between a rename and its sync. The next one uses the name, so it must be durable."""
    run = recorded_runs("power-fedcm")
    at = next(at for at in renames(run.record) if any(each.endswith(name) for each in renamed(run, at - 1)))
    cut_after_kill(run, at, 6, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", ["power-fedcm", "process-scaffold"])
def test_unsynced_names_of_any_killed_coordinator_are_synced_by_the_next(
    tmp_path: Path, recorded_runs: Callable[[str], RecordedRun], job: str
) -> None:
    """After every change of a name."""
    run = recorded_runs(job)
    changes = [at for at, each in enumerate(run.record, 1) if isinstance(each, Named)]
    assert changes, "the run has given no file a name"
    for at in changes:
        cut_after_kill(run, at, 6, tmp_path)


def without(record: Sequence[Operation], what: str) -> list[Operation]:
    """The record of the same program without some syncs."""
    if what == "ledger":
        return [replace(each, synced=False) if isinstance(each, Committed) else each for each in record]
    return [each for each in record if not (isinstance(each, Synced) and each.node.is_folder is (what == "folders"))]


@pytest.mark.parametrize("missing", ["folders", "files", "ledger"])
def test_a_missing_sync_is_found(tmp_path: Path, recorded_runs: Callable[[str], RecordedRun], missing: str) -> None:
    """Without syncs of folders, files or transactions, promised data is lost at the end of the run."""
    run = recorded_runs("power-fedcm")
    crash_images = replace(run, record=without(run.record, missing)).crash_images(NOTHING_MORE)
    with pytest.raises((AssertionError, StoreError)):
        recover_all(crash_images[-1:], tmp_path)
