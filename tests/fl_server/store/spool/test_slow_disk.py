"""A disk with a slow fsync: only the code that needs it waits, and nothing fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from fl_server.rounds.state import Phase
from fl_server.rpc.admin import AdminService
from protos.fl.v1 import admin_pb2
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import World, until

NORTH, SOUTH = {"site": "north"}, {"site": "south"}
RUNNING = admin_pb2.RUN_STATE_RUNNING


class SlowDisk:
    """While it is stopped, calls of fsync wait."""

    def __init__(self, fsync: Callable[[int], None]) -> None:
        self._fsync = fsync
        self._free = threading.Event()
        self._free.set()
        self.waiting = 0

    def __call__(self, descriptor: int) -> None:
        """Replaces os.fsync."""
        self.waiting += 1
        self._free.wait()
        self.waiting -= 1
        self._fsync(descriptor)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the disk until the block ends."""
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    """The disk of every file except the ledger, which SQLite syncs itself."""
    disk = SlowDisk(os.fsync)
    monkeypatch.setattr(os, "fsync", disk)
    return disk


async def contribute(world: World, devices: Sequence[Device]) -> None:
    """All devices train and upload."""
    for device in devices:
        world.spawn(device.contribute(world, await device.assigned()))
        device.works = True


async def test_a_commit_that_waits_for_the_disk_blocks_nothing_else(tmp_path: Path, disk: SlowDisk) -> None:
    """Meanwhile clients connect, admin calls return and another run takes updates. The models are the same."""
    async with World(tmp_path / "quick") as world:
        for name in "ab":
            await Device(name, labels=SOUTH).connect(world)
        await world.create(labels=SOUTH)
        undisturbed = await world.completed()
    async with World(tmp_path / "slow") as world:
        devices = [await Device(name, labels=SOUTH, works=False).connect(world) for name in "ab"]
        run, other = await world.create(labels=SOUTH), await world.create(name="other", labels=NORTH)
        with disk.stopped():
            await contribute(world, devices)
            await until(lambda: disk.waiting and run.state.phase is Phase.COMMITTING, "the checkpoint waits")
            late = [await Device(name, labels=NORTH).connect(world) for name in "cd"]
            await until(lambda: all(device.receipts for device in late), "the other run takes updates")
            answer = await AdminService(world.services, world.coordinator).ListRuns(
                admin_pb2.ListRunsRequest(), NO_CONTEXT
            )
            assert [(status.state, status.rounds_done) for status in answer.runs] == [(RUNNING, 0), (RUNNING, 0)]
            assert disk.waiting == 2  # the model and the momentum
            assert (run.state.phase, other.state.phase) == (Phase.COMMITTING, Phase.STEPPING)
        assert await world.completed() == undisturbed
        await world.completed("other")
