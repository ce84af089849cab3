"""What a run has used: its bytes never fall, and its durations come from a clock that nobody sets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fl_server.rpc.views import run_status
from fl_server.run.rounds import RunRounds
from fl_server.store.records import CommitRecord
from tests.fl_server.criteria import BY_ACCURACY
from tests.fl_server.devices import Device
from tests.fl_server.harness import Journal, World, until


def shown(world: World) -> tuple[int, int]:
    """Bytes down and up of the run, as operators see them."""
    status = run_status(world.coordinator.run("r"))
    return status.bytes_down, status.bytes_up


async def one_of_two(world: World) -> Device:
    """A run in round 0: one client has delivered, the other one has fetched the model. Returns the second."""
    a, b = [await Device(name, works=False).connect(world) for name in "ab"]
    await world.create()
    await a.contribute(world, await a.assigned())
    await b.update(world, await b.assigned())
    return b


@pytest.mark.parametrize("ended", [False, True], ids=["running", "stopped"])
async def test_the_bytes_of_a_run_survive_a_restart(tmp_path: Path, ended: bool) -> None:
    """Also those of a client that has not delivered, and of a run without a committed round."""
    async with World(tmp_path) as world:
        await one_of_two(world)
        before = shown(world)
        assert min(before) > 0
        if ended:
            await world.coordinator.actions.stop(world.coordinator.run("r"), "enough", "admin")
    async with World(tmp_path) as world:
        assert shown(world) == before


async def test_a_killed_coordinator_recovers_the_bytes_of_delivered_updates(tmp_path: Path) -> None:
    """The ledger has the updates: their bytes, and one model for each of their clients."""
    async with World(tmp_path, Journal()) as world:
        await one_of_two(world)
        down, up = shown(world)
        world.journal.dead = True
    async with World(tmp_path) as world:
        assert shown(world) == (down // 2, up)


async def test_what_a_client_shows_again_after_a_restart_is_counted_once(tmp_path: Path) -> None:
    """The client that had fetched the model delivers: its update is all that is added."""
    async with World(tmp_path) as world:
        b = await one_of_two(world)
        down, up = shown(world)
    async with World(tmp_path) as world:
        await Device("a", works=False).connect(world)
        await b.connect(world)
        await b.contribute(world, await b.assigned())
        run = world.coordinator.run("r")
        await until(lambda: run.rounds.committed, "the round is committed")
        assert (run.rounds.recent[0].bytes_down, run.rounds.recent[0].bytes_up) == (down, 2 * up)


def a_commit(down: int) -> CommitRecord:
    """A commit of round 0 that sent so many bytes."""
    return CommitRecord("r", 0, 1.0, 1.0, 1, 2, 0, None, bytes_down=down, bytes_up=0, model_digest="")


def test_bytes_during_a_commit_belong_to_the_next_round() -> None:
    """They came after the record of the round was made. The total stays."""
    rounds = RunRounds(BY_ACCURACY)
    rounds.bytes.total_down += 100
    record = a_commit(rounds.bytes.down)
    rounds.bytes.total_down += 7
    rounds.add(record)
    assert (rounds.bytes.total[0], rounds.bytes.down) == (107, 7)


@contextmanager
def set_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The wall clock is set back by an hour."""
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() - 3600.0)
        yield


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
async def test_a_round_takes_no_negative_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: bool) -> None:
    """The wall clock is set back while the round is under way."""
    began = time.monotonic()
    async with World(tmp_path) as world:
        b = await one_of_two(world)
        if not restarted:
            with set_back(monkeypatch):
                await b.contribute(world, await b.assigned())
                await until(lambda: world.store.commits("r"), "the round is committed")
    if restarted:
        with set_back(monkeypatch):
            async with World(tmp_path) as world:
                await Device("a", works=False).connect(world)
                await b.connect(world)
                await b.contribute(world, await b.assigned())
                await until(lambda: world.store.commits("r"), "the round is committed")
    (commit,) = world.store.commits("r")
    assert 0.0 < commit.seconds < time.monotonic() - began
