"""The time since which a run is in its state. An alert needs it to not count a wait or a pause as a delay."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


def state_since(world: World) -> float | None:
    """The value that a scrape reads for the run."""
    return world.services.metrics.registry.get_sample_value("fl_run_state_since_timestamp_seconds", {"run": "r"})


async def test_every_change_of_a_runs_state_has_its_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for clients, runs, cannot write, runs, is paused and is stopped, each at its own second."""
    run = await world.create(name="r")
    await until(lambda: run.status == "waiting", "it waits")
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    for client in "ab":
        await Device(client).connect(world)
    await until(lambda: run.status == "running", "it runs")
    await until(lambda: state_since(world) == 1000.0, "since now")
    for at, why, status, stuck in ((2000.0, "the disk is full", "waiting", 1), (3000.0, "", "running", 0)):
        monkeypatch.setattr(time, "time", lambda at=at: at)
        run.run_status.writing_failed(why)
        assert (run.status, state_since(world)) == (status, at)
        assert world.metric("fl_run_cannot_write", run="r") == stuck
    monkeypatch.setattr(time, "time", lambda: 4000.0)
    run.run_status.writing_failed("")
    assert state_since(world) == 3000.0
    await world.coordinator.actions.pause(run, "admin")
    assert (run.status, state_since(world)) == ("paused", 4000.0)
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    await world.coordinator.actions.stop(run, "enough", "admin")
    assert (run.status, state_since(world)) == ("stopped", 5000.0)


async def test_a_restored_run_counts_from_its_restore_and_an_ended_run_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time before a restart is no delay of this coordinator, and the time of an end does not change."""
    async with World(tmp_path) as first:
        await first.create(name="r")
    monkeypatch.setattr(time, "time", lambda: 2e9)
    async with World(tmp_path) as second:
        assert state_since(second) == 2e9
        await second.coordinator.actions.stop(second.coordinator.run("r"), "enough", "admin")
    monkeypatch.setattr(time, "time", lambda: 3e9)
    async with World(tmp_path) as third:
        assert state_since(third) == 2e9
