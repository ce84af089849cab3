"""Pushes to a cohort that is larger than one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from fl_server.run import assignments
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until

LARGE = assignments.BATCH + 4
SECTIONS = {"round": {"clients_per_round": LARGE}, "stop": {"rounds": 1}}


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The event loop counts as busy until this is set."""
    event = asyncio.Event()

    async def wait() -> None:
        await event.wait()

    monkeypatch.setattr(assignments, "_idle_loop", wait)
    return event


def assigned(devices: Sequence[Device]) -> int:
    """How many of them got work."""
    return sum(bool(device.pushed("assignment")) for device in devices)


async def test_a_large_cohort_gets_its_work_and_delivers(tmp_path: Path) -> None:
    """Also the clients after the first batch."""
    async with World(tmp_path) as world:
        for number in range(LARGE):
            await Device(f"c{number:02}").connect(world)
        run = await world.create(**SECTIONS)
        await world.completed()
        assert run.rounds.recent[0].accepted == LARGE


async def test_a_busy_loop_gets_one_batch(tmp_path: Path, idle: asyncio.Event) -> None:
    """The others get their work when the loop has time, and a stop in between is not held up."""
    async with World(tmp_path) as world:
        devices = [Device(f"c{number:02}", works=False) for number in range(LARGE)]
        for device in devices:
            await device.connect(world)
        run = await world.create(**SECTIONS)
        await until(lambda: assigned(devices) == assignments.BATCH, "the first batch has its work")
        idle.set()
        await until(lambda: assigned(devices) == LARGE, "all have it")
        assert run.state.outstanding == {device.name for device in devices}


async def test_work_of_an_attempt_that_is_over_is_not_pushed(tmp_path: Path, idle: asyncio.Event) -> None:
    """The run is stopped while pushes wait: the other clients get no work of it."""
    async with World(tmp_path) as world:
        devices = [Device(f"c{number:02}", works=False) for number in range(LARGE)]
        for device in devices:
            await device.connect(world)
        run = await world.create(**SECTIONS)
        await until(lambda: assigned(devices) == assignments.BATCH, "the first batch has its work")
        await world.coordinator.actions.stop(run, "enough", "admin")
        idle.set()
        await until(lambda: run.ended, "it has ended")
        for _ in range(10):
            await asyncio.sleep(0)  # the waiting push runs, and its messages would reach the devices
        assert assigned(devices) == assignments.BATCH
