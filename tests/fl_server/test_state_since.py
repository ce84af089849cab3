"""Since when a run is in its state: what an alert needs that must not count a wait or a pause as a delay."""

from __future__ import annotations

import time

import pytest

from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until


@pytest.fixture
async def world(tmp_path):
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


def since(world):
    """What a scrape finds for the run."""
    return world.parts.metrics.registry.get_sample_value("fl_run_state_since_timestamp_seconds", {"run": "r"})


async def test_every_change_of_a_runs_state_has_its_time(world, monkeypatch):
    """It waits for clients, runs, cannot write, runs, is paused and is stopped, each at a second of its own."""
    run = await world.create(name="r")
    await until(lambda: run.status == "waiting", "it waits")
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    for client in "ab":
        await Device(client).come(world)
    await until(lambda: run.status == "running", "it runs")
    await until(lambda: since(world) == 1000.0, "since now")
    for at, why, status, stuck in ((2000.0, "the disk is full", "waiting", 1), (3000.0, "", "running", 0)):
        monkeypatch.setattr(time, "time", lambda at=at: at)
        run.no_room(why)
        assert (run.status, since(world)) == (status, at)
        assert world.metric("fl_run_cannot_write", run="r") == stuck
    monkeypatch.setattr(time, "time", lambda: 4000.0)
    run.no_room("")
    assert since(world) == 3000.0
    await world.coordinator.pause(run, "admin")
    assert (run.status, since(world)) == ("paused", 4000.0)
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    await world.coordinator.stop(run, "enough", "admin")
    assert (run.status, since(world)) == ("stopped", 5000.0)


async def test_a_run_that_was_read_back_counts_from_then_and_an_ended_one_from_its_end(tmp_path, monkeypatch):
    """What a coordinator did not see is no delay of its own, and an end is where it was."""
    async with World(tmp_path) as first:
        await first.create(name="r")
    monkeypatch.setattr(time, "time", lambda: 2e9)
    async with World(tmp_path) as second:
        assert since(second) == 2e9
        await second.coordinator.stop(second.coordinator.run("r"), "enough", "admin")
    monkeypatch.setattr(time, "time", lambda: 3e9)
    async with World(tmp_path) as third:
        assert since(third) == 2e9
