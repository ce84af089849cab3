"""What comes and goes leaves nothing behind: runs that are over, clients that are gone, uploads that were cut."""

from __future__ import annotations

import asyncio

import pytest

from fl_server import deadline
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until


@pytest.fixture
async def world(tmp_path):
    """A coordinator without clients."""
    async with World(tmp_path, reattach_grace_s=0.05) as world:
        yield world


async def over(world, how):
    """A run that is over: done, or stopped by an operator."""
    run = await world.create(stop={"rounds": 1})
    if how == "stopped":
        await world.coordinator.stop(run, "enough", "admin")
    return await world.ended()


@pytest.mark.parametrize("how", ["completed", "stopped"])
async def test_a_run_that_is_over_has_no_tasks(world, monkeypatch, how):
    """However it ended: what took its events, counted its time and computed has ended with it."""
    monkeypatch.setattr(deadline, "KEEP_EVERY_S", 0.01)
    if how == "completed":
        for name in "ab":
            await Device(name).come(world)
    before = asyncio.all_tasks()
    run = await over(world, how)
    assert run.status == how
    await until(
        lambda: {task for task in asyncio.all_tasks() - before if not task.done()} <= world.tasks, "none is left"
    )
