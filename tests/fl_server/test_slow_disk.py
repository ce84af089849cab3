"""A disk whose fsync takes long: what needs it waits, everything else goes on, and nothing ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from fl_server.admin import AdminService
from fl_server.round_state import Phase
from protos.fl.v1 import admin_pb2
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until

NORTH, SOUTH = {"site": "north"}, {"site": "south"}
RUNNING = admin_pb2.RUN_STATE_RUNNING


class SlowDisk:
    """While it is stopped, whoever calls fsync waits."""

    def __init__(self, fsync: Callable[[int], None]) -> None:
        self._fsync = fsync
        self._free = threading.Event()
        self._free.set()
        self.waiting = 0

    def __call__(self, descriptor: int) -> None:
        """Stands for os.fsync."""
        self.waiting += 1
        self._free.wait()
        self.waiting -= 1
        self._fsync(descriptor)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Until the block ends."""
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()


@pytest.fixture
def disk(monkeypatch):
    """The disk under every file but the ledger's, which SQLite syncs by itself."""
    disk = SlowDisk(os.fsync)
    monkeypatch.setattr(os, "fsync", disk)
    return disk


async def contribute(world, devices):
    """All of them do their work."""
    for device in devices:
        world.spawn(device.contribute(world, await device.assigned()))
        device.works = True


async def test_a_commit_that_waits_for_the_disk_holds_nobody_up(tmp_path, disk):
    """While it waits, clients come, operators are answered, another run collects; then the model is the same."""
    async with World(tmp_path / "quick") as world:
        for name in "ab":
            await Device(name, labels=SOUTH).come(world)
        await world.create(labels=SOUTH)
        undisturbed = await world.completed()
    async with World(tmp_path / "slow") as world:
        devices = [await Device(name, labels=SOUTH, works=False).come(world) for name in "ab"]
        run, other = await world.create(labels=SOUTH), await world.create(name="other", labels=NORTH)
        with disk.stopped():
            await contribute(world, devices)
            await until(lambda: disk.waiting and run.state.phase is Phase.COMMITTING, "the checkpoint waits")
            late = [await Device(name, labels=NORTH).come(world) for name in "cd"]
            await until(lambda: all(device.receipts for device in late), "the other run takes updates")
            answer = await AdminService(world.parts, world.coordinator).ListRuns(admin_pb2.ListRunsRequest(), None)
            assert [(status.state, status.rounds_done) for status in answer.runs] == [(RUNNING, 0), (RUNNING, 0)]
            assert disk.waiting == 2  # the model and the momentum
            assert (run.state.phase, other.state.phase) == (Phase.COMMITTING, Phase.STEPPING)
        assert await world.completed() == undisturbed
        await world.completed("other")
