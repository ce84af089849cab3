"""A coordinator's run with a buffer: its ledger, its kills, and what clients are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_server.rounds.by_client import Work
from fl_server.rpc.views import run_status
from fl_server.run.run import Run
from fl_web.facts.run import under_way
from protos.fl.v1.admin_pb2 import BufferStatus
from protos.fl.v1.training_pb2 import RefusalReason
from tests.fl_server.buffered_runs import BUFFER, NAMES, ROUNDS, buffered_run, models_of
from tests.fl_server.devices import Device, connect, deliver
from tests.fl_server.harness import World, until
from tests.marks import slow_except

DEATHS = range(11, 50)
"""Writes from the first draw to the last commits; how many there are depends on the order of arrival."""


async def test_the_models_follow_from_the_order_in_the_ledger(tmp_path: Path) -> None:
    """Another engine makes them from the lists and the devices' bytes alone."""
    digests, lists, updates, _ = await buffered_run(tmp_path / "run")
    assert len(digests) == ROUNDS
    assert models_of(tmp_path / "again", lists, updates) == digests


@pytest.mark.parametrize("dies_at", slow_except(DEATHS, *DEATHS[::24]))
async def test_a_kill_after_any_write_loses_nothing(tmp_path: Path, dies_at: int) -> None:
    """The order in the ledger makes the same models. A counted device has its outcome, and no other has one."""
    digests, lists, updates, devices = await buffered_run(tmp_path / "run", dies_at)
    assert models_of(tmp_path / "again", lists, updates) == digests
    counted = {(client, version) for taken in lists for client, version, _ in taken}
    told = {(device.name, key[1]) for device in devices for key, outcome in device.outcomes.items() if outcome.counted}
    assert told <= counted


async def open_run(world: World, **round_: int) -> tuple[Run, dict[str, Device]]:
    """A run whose first clients have their work; devices answer when the test asks for it."""
    devices = {device.name: device for device in await connect(world, *NAMES)}
    run = await world.create(round={**BUFFER, **round_}, stop={"rounds": 3})
    await until(lambda: len(run.state.outstanding) == 3, "three clients work")
    return run, {client: devices[client] for client in sorted(run.state.outstanding)}


async def test_operators_see_the_buffer_and_the_versions(tmp_path: Path) -> None:
    """In the status, in its words, and in metrics; the staleness of an update is that of the step that has it."""
    async with World(tmp_path) as world:
        run, working = await open_run(world)
        first, second, slow = working.values()
        await deliver(world, first)
        assert run_status(run).buffer == BufferStatus(updates=1, goal=2, working=3, versions=1)
        assert world.metric("fl_buffered_updates", run="r") == 1
        await deliver(world, second)
        await until(lambda: run.state.round == 1 and run.state.collects, "the first step is committed")
        status = run_status(run).buffer
        assert (status.updates, status.versions, status.oldest) == (0, 2, 1)
        assert world.metric("fl_model_versions", run="r") == 2
        words = dict(under_way(run_status(run)))["buffer"]
        assert words == ("0 of 2 updates; 2 versions of the model in use, the oldest 1 step old",)
        await deliver(world, slow)
        await deliver(world, first, 1)
        await until(lambda: run.state.round == 2, "the second step is committed")
        assert [version for _, version, _ in world.store.taken("r", 1)] == [0, 1]
        assert run.rounds.latest_statistics.staleness == {0: 1, 1: 1}


async def test_an_update_that_became_too_stale_is_refused_with_its_reason(tmp_path: Path) -> None:
    """Its client is told at the commit that its work is not wanted, and is idle again."""
    async with World(tmp_path) as world:
        run, working = await open_run(world, max_staleness=0)
        first, second, slow = working.values()
        await slow.update(world, await slow.assigned())
        await deliver(world, first)
        await deliver(world, second)
        await until(lambda: run.state.round == 1 and run.state.collects, "the first step is committed")
        cancelled = await until(lambda: slow.pushed("cancel"), "it is told")
        assert (cancelled[0].key.round, cancelled[0].reason) == (0, RefusalReason.REFUSAL_REASON_STALE)
        receipt = await deliver(world, slow)
        assert receipt is not None
        assert (receipt.admitted, receipt.reason) == (False, RefusalReason.REFUSAL_REASON_STALE)
        assert "round.max_staleness" in receipt.detail


async def test_a_repeat_after_other_work_began_gets_the_first_verdict(tmp_path: Path) -> None:
    """The client works from a newer version; what it sends again for the older one changes nothing."""
    async with World(tmp_path) as world:
        run, working = await open_run(world)
        first, second, _ = working.values()
        receipt = await deliver(world, first)
        await deliver(world, second)
        await until(lambda: run.state.work.get(first.name) == Work(1, 0), "it has work of the next version")
        assert await deliver(world, first) == receipt
        assert first.name in run.state.outstanding


async def test_an_outcome_is_known_once_a_step_has_the_update(tmp_path: Path) -> None:
    """A daemon that registers before learns nothing of an update that waits in the buffer."""
    async with World(tmp_path) as world:
        run, working = await open_run(world)
        first, second, slow = working.values()
        await deliver(world, first)
        await deliver(world, second)
        await until(lambda: run.state.round == 1 and run.state.collects, "the first step is committed")
        await deliver(world, slow)
        for device in (slow, first):
            device.outcomes.clear()
            await device.leave()
            await device.connect(world)
        assert ("r", 0, 0) not in slow.outcomes
        assert first.outcomes["r", 0, 0].counted
