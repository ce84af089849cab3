"""The time limits of a run when the coordinator stops, is killed and restarts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_server.rounds.state import Phase
from fl_server.run import failures
from fl_server.run.run import Run
from fl_server.store.errors import StoreFull
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until

DEADLINE_S = 600.0


async def open_run(world: World, *names: str, **sections: Any) -> Run:
    """A run whose first round waits for devices that do nothing."""
    devices = [await Device(name, works=False).connect(world) for name in names]
    run = await world.create(round={"clients_per_round": 2, "deadline_s": DEADLINE_S}, **sections)
    await devices[0].assigned()
    return run


def time_left(world: World) -> float:
    """The time left of the only attempt, in the ledger."""
    (attempt,) = world.store.attempts("r", 0)
    left: float = attempt.seconds_left
    return left


async def test_an_attempt_starts_with_its_whole_time(tmp_path: Path) -> None:
    """It is written with the cohort, before any client gets an assignment."""
    async with World(tmp_path) as world:
        await open_run(world, "a", "b")
        assert time_left(world) == DEADLINE_S


async def test_a_stop_writes_the_time_left(tmp_path: Path) -> None:
    """Time counts only while a coordinator runs: the next one continues from the written value."""
    async with World(tmp_path) as world:
        run = await open_run(world, "a", "b")
        run.deadline.start(123.0)
        assert run.deadline.seconds_left <= 123.0
    async with World(tmp_path) as world:
        left = time_left(world)
        assert 0 < left < 123.0
        run = world.coordinator.run("r")
        assert run.state.phase is Phase.COLLECTING
        assert run.deadline.seconds_left <= left


async def test_the_time_left_is_written_repeatedly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed coordinator loses only the last few seconds of counting."""
    monkeypatch.setattr(failures, "SAVE_EVERY_S", 0.005)
    async with World(tmp_path) as world:
        run = await open_run(world, "a", "b")
        run.deadline.start(50.0)
        first = await until(lambda: time_left(world) < 50.0 and time_left(world), "it is written")
        await until(lambda: time_left(world) < first, "it is written again")
        world.journal.dead = True
    async with World(tmp_path) as world:
        assert world.coordinator.run("r").deadline.seconds_left < 50.0


async def test_clients_have_time_to_reconnect(tmp_path: Path) -> None:
    """If no time was left, a restart allows the reattach grace; otherwise no client could deliver."""
    async with World(tmp_path) as world:
        await open_run(world, "a", "b")
        world.store.set_seconds_left("r", {(0, 0, 0): 0.0})
        world.journal.dead = True
    async with World(tmp_path, reattach_grace_s=300.0) as world:
        assert 1.0 < world.coordinator.run("r").deadline.seconds_left <= 300.0


async def test_a_ledger_without_the_time_left_gives_the_whole_time(tmp_path: Path) -> None:
    """As before its first write."""
    async with World(tmp_path) as world:
        await open_run(world, "a", "b")
        world.store.set_seconds_left("r", {(0, 0, 0): None})
        world.journal.dead = True
    async with World(tmp_path) as world:
        assert 300.0 < world.coordinator.run("r").deadline.seconds_left <= DEADLINE_S


async def test_the_time_of_an_ended_attempt_is_not_written(tmp_path: Path) -> None:
    """The ledger has the next attempt with its whole time before that attempt's clock starts."""
    async with World(tmp_path) as world:
        run = await open_run(world, "a", "b")
        run.state = replace(run.state, attempt=1)
        writes = len(world.journal.writes)
        await run.deadline.save()
        assert len(world.journal.writes) == writes


async def test_a_failed_write_of_the_time_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk the older, longer time remains."""
    async with World(tmp_path) as world:
        run = await open_run(world, "a", "b")

        def full(*_: object) -> None:
            raise StoreFull("no room")

        with monkeypatch.context() as patch:
            patch.setattr(world.store, "set_seconds_left", full)
            await run.deadline.save()
        assert (time_left(world), run.state.phase) == (DEADLINE_S, Phase.COLLECTING)


async def test_the_wall_time_continues_after_a_restart(tmp_path: Path) -> None:
    """A coordinator that stops has written the elapsed time."""
    async with World(tmp_path) as world:
        run = await open_run(world, "a", "b", stop={"rounds": 2, "wall_time_s": 600.0})
        run.state = replace(run.state, elapsed_s=400.0)
    async with World(tmp_path) as world:
        assert 400.0 <= world.coordinator.run("r").record.elapsed_s < 500.0


async def test_a_killed_coordinator_has_counted_wall_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it except the last few seconds."""
    monkeypatch.setattr(failures, "SAVE_EVERY_S", 0.005)
    async with World(tmp_path) as world:
        run = await open_run(world, "a", "b", stop={"rounds": 2, "wall_time_s": 600.0})
        run.state = replace(run.state, elapsed_s=400.0)
        await until(lambda: world.store.runs()[0].elapsed_s >= 400.0, "it is written")
        world.journal.dead = True
    async with World(tmp_path) as world:
        assert world.coordinator.run("r").record.elapsed_s >= 400.0
