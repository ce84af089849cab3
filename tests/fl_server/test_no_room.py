"""A disk that is full, read-only or slow: what the run says, what goes on meanwhile, and that it goes on after."""

from __future__ import annotations

import errno

import pytest

from fl_server import ledger as ledger_module
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until


@pytest.fixture
async def world(tmp_path, monkeypatch):
    """A coordinator that tries again at once."""
    monkeypatch.setattr(ledger_module, "NO_ROOM_S", 0.005)
    async with World(tmp_path) as world:
        yield world


def history(world):
    """(event, detail) of the run's last change but the ones that a round makes."""
    return [(entry.event, entry.detail) for entry in world.store.history("r") if entry.event == "run_goes_on"]


async def fleet(world):
    """Two devices that do what they are told."""
    return [await Device(name).come(world) for name in "ab"]


@pytest.fixture
async def undisturbed(tmp_path):
    """Digests of the run that nothing happens to."""
    async with World(tmp_path / "undisturbed") as world:
        await fleet(world)
        await world.create()
        return await world.completed()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES], ids=["read-only", "full", "no right"])
async def test_a_checkpoint_that_cannot_be_written_is_waited_for(world, undisturbed, monkeypatch, number):
    """The run waits and says why; once it can be written the run goes on, with a line of history, and no bit differs."""
    await fleet(world)
    with monkeypatch.context() as patch:
        refuse(patch, number)
        run = await world.create_later()
        await until(lambda: run.waiting_for, "it says so")
        assert "the coordinator cannot write: could not save the checkpoint" in run.waiting_for
        assert "make room or give the right to write" in run.waiting_for
        assert (run.status, run.log.commits, run.state.ending) == ("waiting", {}, None)
    assert await world.completed() == undisturbed
    assert run.waiting_for == ""
    ((_, why),) = history(world)
    assert why.startswith("before: the coordinator cannot write")
