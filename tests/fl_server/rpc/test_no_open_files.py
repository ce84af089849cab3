"""The limit of open files is reached: runs wait as for a full disk, and continue with the same bits."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_server.aggregation.updates import by_block
from fl_server.run.models import ModelStore
from fl_server.store import ledger as ledger_module
from fl_server.store.checkpoints import Checkpoint, Checkpoints
from fl_server.store.errors import NoOpenFiles, file_digest
from fl_server.store.spool.part_file import UpdateFile
from fl_server.store.spool.spool import Spool, SpoolKey
from protos.codec import Layout
from tests.fl_server.devices import Device
from tests.fl_server.harness import World

MODEL = Checkpoint({"w": torch.ones(3)})
KEY = SpoolKey("r", 0, 0, "a")


@contextmanager
def no_open_files() -> Iterator[None]:
    """This process cannot open a file in this context: its limit is the lowest free file number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "RETRY_S", 0.01)


async def digests(folder: Path) -> tuple[list[str], list[str]]:
    """The digests of the models of a run of two clients, and the events of its history."""
    async with World(folder) as world:
        for name in "ab":
            await Device(name).connect(world)
        run = await world.create()
        await world.completed()
        history = await world.services.ledger.do(world.services.ledger.store.history, run.id, 1000)
        return [commit.model_digest for commit in run.rounds.recent.values()], [entry.event for entry in history]


@pytest.mark.parametrize(
    ("owner", "method"), [(ModelStore, "compute_next"), (Checkpoints, "save")], ids=["step", "commit"]
)
async def test_a_run_waits_for_open_files_and_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str
) -> None:
    """At the step, which reads updates, and at the commit, which writes the model; the history has the wait."""
    undisturbed, _ = await digests(tmp_path / "undisturbed")
    whole = getattr(owner, method)
    tries: list[Any] = []

    async def step(self: Any, *args: Any) -> Any:
        tries.append(method)
        if len(tries) > 1:
            return await whole(self, *args)
        with no_open_files():
            return await whole(self, *args)

    def save(self: Any, run_id: str, round_: int, checkpoint: Any) -> Any:
        tries.append(round_)
        if tries.count(0) != 1 or round_ != 0:
            return whole(self, run_id, round_, checkpoint)
        with no_open_files():
            return whole(self, run_id, round_, checkpoint)

    monkeypatch.setattr(owner, method, {"compute_next": step, "save": save}[method])
    disturbed, events = await digests(tmp_path / "disturbed")
    assert disturbed == undisturbed
    assert len(tries) > len(undisturbed)
    assert events.count("run_goes_on") == 1


def test_each_part_of_the_store_reports_a_lack_of_open_files(tmp_path: Path) -> None:
    """When a checkpoint is saved or read, or an update opened or read; the error is temporary."""
    checkpoints, spool = Checkpoints(tmp_path / "c"), Spool(tmp_path / "s")
    checkpoints.save("r", 0, MODEL)
    part = spool.open_part(KEY, b"d" * 32, 4)
    part.write(0, b"\0\0\0\0")
    path = part.seal()
    layout = Layout.of({"w": torch.ones(1)}, ["w"])
    calls: list[Callable[[], Any]] = [
        lambda: checkpoints.save("r", 1, MODEL),
        lambda: checkpoints.latest("r"),
        lambda: spool.open_part(SpoolKey("r", 0, 0, "b"), b"d" * 32, 4),
        lambda: UpdateFile(path),
        lambda: file_digest(path),
        lambda: by_block([path], layout.entries[0], list),
    ]
    with no_open_files():
        for call in calls:
            with pytest.raises(NoOpenFiles, match="Too many open files.*see who holds connections"):
                call()
    checkpoints.save("r", 1, MODEL)
    assert checkpoints.rounds("r") == [0, 1]


def test_a_checkpoint_is_saved_over_the_rest_of_a_failed_attempt(tmp_path: Path) -> None:
    """Files of a failed attempt do not fail the next one."""
    checkpoints = Checkpoints(tmp_path)
    left = tmp_path / "run-r" / ".part-round-000000"
    left.mkdir(parents=True)
    (left / "half").touch()
    with no_open_files(), pytest.raises(NoOpenFiles):
        checkpoints.save("r", 0, MODEL)
    assert checkpoints.rounds("r") == []
    checkpoints.save("r", 0, MODEL)
    assert checkpoints.rounds("r") == [0]
