"""The times that a run has left, over stops, deaths and restarts of the coordinator."""

from __future__ import annotations

from dataclasses import replace

from fl_server import deadline
from fl_server.round_state import Phase
from fl_server.store.base import StoreFull
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until

DEADLINE_S = 600.0


async def opened(world, *names, **sections):
    """A run whose first round waits for devices that do nothing."""
    devices = [await Device(name, works=False).come(world) for name in names]
    run = await world.create(round={"clients_per_round": 2, "deadline_s": DEADLINE_S}, **sections)
    await devices[0].assigned()
    return run


def time_left(world):
    """What the ledger has for the only attempt."""
    (attempt,) = world.store.attempts("r", 0)
    return attempt.seconds_left


async def test_an_attempt_opens_with_its_whole_time(tmp_path):
    """Written with the cohort, before anybody is told."""
    async with World(tmp_path) as world:
        await opened(world, "a", "b")
        assert time_left(world) == DEADLINE_S


async def test_a_stop_writes_what_is_left(tmp_path):
    """The coordinator counts while it runs, not while it is down: the next one goes on with the same number."""
    async with World(tmp_path) as world:
        run = await opened(world, "a", "b")
        run.deadline.start(123.0)
        assert run.deadline.seconds_left <= 123.0
    async with World(tmp_path) as world:
        left = time_left(world)
        assert 0 < left < 123.0
        run = world.coordinator.run("r")
        assert run.state.phase is Phase.COLLECTING
        assert run.deadline.seconds_left <= left


async def test_it_is_written_again_and_again(tmp_path, monkeypatch):
    """A coordinator that is killed has lost no more than the last few seconds of counting."""
    monkeypatch.setattr(deadline, "KEEP_EVERY_S", 0.005)
    async with World(tmp_path) as world:
        run = await opened(world, "a", "b")
        run.deadline.start(50.0)
        first = await until(lambda: time_left(world) < 50.0 and time_left(world), "it is written")
        await until(lambda: time_left(world) < first, "it is written again")
        world.journal.dead = True
    async with World(tmp_path) as world:
        assert world.coordinator.run("r").deadline.seconds_left < 50.0


async def test_clients_have_time_to_come_back(tmp_path):
    """Where nothing was left, a restart gives as long as a lost stream is waited for; else nobody could deliver."""
    async with World(tmp_path) as world:
        await opened(world, "a", "b")
        world.store.set_seconds_left("r", (0, 0, 0), 0.0)
        world.journal.dead = True
    async with World(tmp_path, reattach_grace_s=300.0) as world:
        assert 1.0 < world.coordinator.run("r").deadline.seconds_left <= 300.0


async def test_an_older_ledger_gives_the_whole_time(tmp_path):
    """It does not say what was left."""
    async with World(tmp_path) as world:
        await opened(world, "a", "b")
        world.store.set_seconds_left("r", (0, 0, 0), None)
        world.journal.dead = True
    async with World(tmp_path) as world:
        assert 300.0 < world.coordinator.run("r").deadline.seconds_left <= DEADLINE_S


async def test_the_time_of_an_attempt_that_is_over_is_not_written(tmp_path):
    """The next attempt is in the ledger with its whole time before its own clock starts."""
    async with World(tmp_path) as world:
        run = await opened(world, "a", "b")
        run.state = replace(run.state, attempt=1)
        writes = len(world.journal.writes)
        await run.deadline.keep()
        assert len(world.journal.writes) == writes


async def test_what_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    """On a full disk the older and longer time stands."""
    async with World(tmp_path) as world:
        run = await opened(world, "a", "b")

        def full(*_):
            raise StoreFull("no room")

        with monkeypatch.context() as patch:
            patch.setattr(world.store, "set_seconds_left", full)
            await run.deadline.keep()
        assert (time_left(world), run.state.phase) == (DEADLINE_S, Phase.COLLECTING)


async def test_the_wall_time_goes_on_where_it_was(tmp_path):
    """A coordinator that stops has written how much of it is over."""
    async with World(tmp_path) as world:
        run = await opened(world, "a", "b", stop={"rounds": 2, "wall_time_s": 600.0})
        run.record = replace(run.record, elapsed_s=400.0)
    async with World(tmp_path) as world:
        assert 400.0 <= world.coordinator.run("r").record.elapsed_s < 500.0


async def test_a_killed_coordinator_has_counted_wall_time(tmp_path, monkeypatch):
    """But for the last few seconds; without a limit nothing is written."""
    monkeypatch.setattr(deadline, "KEEP_EVERY_S", 0.005)
    async with World(tmp_path) as world:
        run = await opened(world, "a", "b", stop={"rounds": 2, "wall_time_s": 600.0})
        run.record = replace(run.record, elapsed_s=400.0)
        await until(lambda: world.store.runs()[0].elapsed_s >= 400.0, "it is written")
        world.journal.dead = True
    async with World(tmp_path) as world:
        assert world.coordinator.run("r").record.elapsed_s >= 400.0
