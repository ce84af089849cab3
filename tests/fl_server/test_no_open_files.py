"""No further file may be opened: runs wait as for a full disk, say why, and go on with the same bits."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager

import pytest
import torch

from fl_server import ledger as ledger_module
from fl_server.admission import file_digest
from fl_server.model_line import ModelLine
from fl_server.reduce import by_block
from fl_server.spool import Spool, SpoolKey
from fl_server.store.base import NoOpenFiles
from fl_server.store.checkpoints import Checkpoint, Checkpoints
from protos.codec import Layout
from tests.fl_server.devices import Device
from tests.fl_server.harness import World

MODEL = Checkpoint({"w": torch.ones(3)})
KEY = SpoolKey("r", 0, 0, "a")


@contextmanager
def no_open_files():
    """This process may open no file meanwhile: the lowest number that is free is its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(ledger_module, "NO_ROOM_S", 0.01)


async def digests(folder):
    """Of the models of a run of two clients, and the events of its history."""
    async with World(folder) as world:
        for name in "ab":
            await Device(name).come(world)
        run = await world.create()
        await world.completed()
        history = await world.parts.ledger.do(world.parts.ledger.store.history, run.id, 1000)
        return [commit.model_digest for commit in run.log.commits.values()], [entry.event for entry in history]


@pytest.mark.parametrize(("owner", "method"), [(ModelLine, "step"), (Checkpoints, "save")], ids=["step", "commit"])
async def test_a_run_waits_for_open_files_and_has_the_same_bits(tmp_path, monkeypatch, owner, method):
    """At the step, which reads updates, and at the commit, which writes the model; the history tells of the wait."""
    undisturbed, _ = await digests(tmp_path / "undisturbed")
    whole, tries = getattr(owner, method), []

    async def step(self, *args):
        tries.append(method)
        if len(tries) > 1:
            return await whole(self, *args)
        with no_open_files():
            return await whole(self, *args)

    def save(self, run_id, round_, checkpoint):
        tries.append(round_)
        if tries.count(0) != 1 or round_ != 0:
            return whole(self, run_id, round_, checkpoint)
        with no_open_files():
            return whole(self, run_id, round_, checkpoint)

    monkeypatch.setattr(owner, method, {"step": step, "save": save}[method])
    disturbed, events = await digests(tmp_path / "disturbed")
    assert disturbed == undisturbed
    assert len(tries) > len(undisturbed)
    assert events.count("run_goes_on") == 1


def test_each_part_of_the_store_says_what_it_lacks(tmp_path):
    """A checkpoint is saved or read, an update opened, read or looked through: each is what passes by itself."""
    checkpoints, spool = Checkpoints(tmp_path / "c"), Spool(tmp_path / "s")
    checkpoints.save("r", 0, MODEL)
    part = spool.open_part(KEY, b"d" * 32, 4)
    part.write(0, b"\0\0\0\0")
    path = part.seal()
    layout = Layout.of({"w": torch.ones(1)}, ["w"])
    calls = [
        lambda: checkpoints.save("r", 1, MODEL),
        lambda: checkpoints.load("r", 0),
        lambda: spool.open_part(SpoolKey("r", 0, 0, "b"), b"d" * 32, 4),
        lambda: spool.open_for_reading(KEY, b"d" * 32),
        lambda: file_digest(path),
        lambda: by_block([path], layout.entries[0], list),
    ]
    with no_open_files():
        for call in calls:
            with pytest.raises(NoOpenFiles, match="Too many open files.*see who holds connections"):
                call()
    checkpoints.save("r", 1, MODEL)
    assert checkpoints.rounds("r") == [0, 1]


def test_a_checkpoint_is_saved_behind_one_that_could_not_be_tidied_up(tmp_path):
    """What a failed attempt left is no reason to fail the next."""
    checkpoints = Checkpoints(tmp_path)
    left = tmp_path / "run-r" / ".part-round-000000"
    left.mkdir(parents=True)
    (left / "half").touch()
    with no_open_files(), pytest.raises(NoOpenFiles):
        checkpoints.save("r", 0, MODEL)
    assert checkpoints.rounds("r") == []
    checkpoints.save("r", 0, MODEL)
    assert checkpoints.rounds("r") == [0]
