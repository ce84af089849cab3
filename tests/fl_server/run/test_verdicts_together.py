"""Many updates that wait for their verdicts: decided in one transaction, with the results of one by one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fl_server.run.run import Run
from fl_server.store.errors import StoreFull
from tests.fl_server.devices import Device
from tests.fl_server.harness import Journal, World, until

NAMES = [f"client-{number:02d}" for number in range(12)]
ALL: dict[str, Any] = {"round": {"clients_per_round": len(NAMES)}, "stop": {"rounds": 1}}


async def all_wait(world: World, devices: list[Device], run: Run) -> list[asyncio.Task[Any]]:
    """The uploads of all devices. They wait for the run's turn, which the caller holds."""
    assignments = [await device.assigned() for device in devices]
    sending = [
        asyncio.create_task(device.contribute(world, assignment))
        for device, assignment in zip(devices, assignments, strict=True)
    ]
    await until(lambda: len(run.submissions._waiting) == len(devices), "all updates wait for their verdicts")
    return sending


async def started(world: World, **sections: Any) -> tuple[Run, list[Device]]:
    """A run that collects, and its devices, which the test makes deliver."""
    devices = [await Device(name, works=False).connect(world) for name in NAMES]
    run = await world.create(**{**ALL, **sections})
    await until(lambda: run.state.drawn, "a cohort is drawn")
    return run, devices


async def alone(folder: Path) -> list[str]:
    """The models of the run with updates that come one after the other."""
    async with World(folder) as world:
        _, devices = await started(world)
        for device in devices:
            await device.contribute(world, await device.assigned())
        return await world.completed()


async def test_waiting_updates_are_decided_in_one_transaction(tmp_path: Path) -> None:
    """Each call gets its receipt, and the model is the one of updates that come one by one."""
    expected = await alone(tmp_path / "alone")
    async with World(tmp_path / "together") as world:
        run, devices = await started(world)
        async with run.turn:
            sending = await all_wait(world, devices, run)
        receipts = await asyncio.gather(*sending)
        assert all(receipt is not None and receipt.admitted for receipt in receipts)
        assert await world.completed() == expected
        assert world.journal.writes.count("record_updates") == 1
        assert "record_update" not in world.journal.writes


async def test_a_kill_behind_the_transaction_loses_no_update(tmp_path: Path) -> None:
    """The coordinator that comes next has all of them, and makes the same model."""
    expected = await alone(tmp_path / "alone")
    async with World(tmp_path / "together", Journal("record_updates")) as world:
        run, devices = await started(world)
        async with run.turn:
            sending = await all_wait(world, devices, run)
        await until(lambda: world.journal.dead, "the coordinator is killed")
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
    async with World(tmp_path / "together") as world:
        assert len(world.coordinator.run("r").state.drawn) == len(NAMES)
        for device in devices:
            await device.connect(world)
        assert await world.completed() == expected


async def test_a_round_admits_no_more_than_it_needs(tmp_path: Path) -> None:
    """With over-selection the updates behind the goal are late, as they are one by one."""
    section = {"clients_per_round": 9, "close": "goal", "over_selection": 12 / 9, "min_clients": len(NAMES)}
    async with World(tmp_path) as world:
        run, devices = await started(world, round=section)
        async with run.turn:
            sending = await all_wait(world, devices, run)
        receipts = await asyncio.gather(*sending)
        assert sorted(receipt.admitted for receipt in receipts if receipt is not None) == [False] * 3 + [True] * 9
        await world.completed()
        assert sum(update.admitted for update in world.store.updates("r", 0, 0)) == 9


async def test_a_failed_transaction_fails_all_calls_and_nothing_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients send again, and then all of them count."""
    async with World(tmp_path) as world:
        run, devices = await started(world)

        def full(*_: object) -> None:
            raise StoreFull("no room")

        with monkeypatch.context() as patch:
            patch.setattr(world.store, "record_updates", full)
            async with run.turn:
                sending = await all_wait(world, devices, run)
            results = await asyncio.gather(*sending, return_exceptions=True)
        assert {type(result) for result in results} == {StoreFull}
        assert (len(run.state.admitted), world.store.updates("r", 0, 0)) == (0, [])
        for device in devices:
            await device.contribute(world, await device.assigned())
        await world.completed()
