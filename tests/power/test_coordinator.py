"""A coordinator that loses its power after any operation on its state directory, and goes on with what the drive kept.

It starts, knows of every commit that somebody was told of, and ends the run with the models, lists and counters of the
run that nothing happened to. With durability "power" no update is sent again that there was a receipt for; with
"process" one may be, and nothing torn is counted.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from fl_server.store.base import StoreError
from tests.power.drives import Cut, Rest
from tests.power.lives import Job, Life, Wreck
from tests.power.recorder import Ended, Named, Operation, Synced, renames

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
HOWS = {
    "nothing-more": NOTHING_MORE,
    "names-without-content": Cut(names=Rest.KEPT),
    "files-ahead-of-the-ledger": Cut(Rest.KEPT, Rest.KEPT, Rest.LOST),
    "ledger-ahead-of-the-files": Cut(Rest.LOST, Rest.LOST, Rest.KEPT),
    **{f"drawn-{seed}": Cut(Rest.DRAWN, Rest.DRAWN, Rest.DRAWN, seed) for seed in (1, 2)},
}
SPREAD = 2
"""Cuts of each kind and job that are always tried; all the others are slow."""


@pytest.fixture(scope="session")
def lives(tmp_path_factory):
    """Each job's run, undisturbed and written down; made when it is asked for."""
    return functools.cache(lambda name: Life.of(JOBS[name], tmp_path_factory.mktemp("life")))


def recover_all(wrecks: Sequence[Wreck], folder) -> None:
    """Each in a folder of its own; a failure says which one it was."""
    for wreck in wrecks:
        try:
            asyncio.run(wreck.recover(folder / f"{wreck.at}"))
        except BaseException as error:
            error.add_note(str(wreck))
            raise


@pytest.mark.parametrize(
    ("job", "how"),
    [*(("power-fedcm", how) for how in HOWS), *(("process-scaffold", how) for how in ("nothing-more", "drawn-1"))],
)
def test_a_cut_of_the_power_changes_nothing(tmp_path, lives, job, how):
    """A drawn few of the cuts, other ones for each kind."""
    wrecks = lives(job).wrecks(HOWS[how])
    recover_all(Random(how).sample(wrecks, min(SPREAD, len(wrecks))), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("job", JOBS)
def test_a_cut_of_the_power_after_any_operation_changes_nothing(tmp_path, lives, job, how):
    """All of them."""
    recover_all(lives(job).wrecks(HOWS[how]), tmp_path)


def cut_after_kill(life: Life, at: int, cuts: int, folder) -> None:
    """Kill the coordinator after an operation, start another, and cut that one's power at its first chances."""
    wrecks = life.killed(at, folder / f"killed-{at}").wrecks(NOTHING_MORE)
    recover_all(wrecks[:cuts], folder / f"after-{at}")


@pytest.mark.parametrize("name", [".update", "round-000000"])
def test_what_a_killed_coordinator_left_unsynced_is_synced_by_the_next(tmp_path, lives, name):
    """It was killed between a rename and its sync: the next one believes the name, and so the name must last."""
    life = lives("power-fedcm")
    at = next(at for at in renames(life.record) if any(each.endswith(name) for each in life.record[at - 1].changes))
    cut_after_kill(life, at, 6, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", ["power-fedcm", "process-scaffold"])
def test_what_any_killed_coordinator_left_unsynced_is_synced_by_the_next(tmp_path, lives, job):
    """After every change of a name."""
    life = lives(job)
    for at in [at for at, each in enumerate(life.record, 1) if isinstance(each, Named)]:
        cut_after_kill(life, at, 6, tmp_path)


def without(record: Sequence[Operation], what: str) -> list[Operation]:
    """The same record of a program that syncs less."""
    if what == "ledger":
        return [replace(each, synced=False) if isinstance(each, Ended) else each for each in record]
    return [each for each in record if not (isinstance(each, Synced) and each.node.is_folder is (what == "folders"))]


@pytest.mark.parametrize("missing", ["folders", "files", "ledger"])
def test_a_sync_that_is_missing_is_found_out(tmp_path, lives, missing):
    """The same run, but no folder is synced, or no file, or no transaction: at its end something promised is gone."""
    life = lives("power-fedcm")
    wrecks = replace(life, record=without(life.record, missing)).wrecks(NOTHING_MORE)
    with pytest.raises((AssertionError, StoreError)):
        recover_all(wrecks[-1:], tmp_path)
