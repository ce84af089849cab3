"""Releases of a whole coordinator: who is told what, what is written, and what a killed coordinator goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fl_server.errors import InvalidInput, NoSuchRelease, WrongRelease
from fl_server.rpc.admin import AdminService
from fl_server.runs import staging
from protos.fl.v1 import admin_pb2 as pb
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import Journal, Killed, World, run_config, until
from tests.fl_server.released import MODEL, Receiver, description, release
from tests.fl_server.rpc.test_owners import ALICE, BOB, EYES, ROOT, calling_as

NAMES = ("a", "b", "c", "d")
HALF = pb.ReleaseRules(stages=[0.5, 1.0], most_failed=0.25, metric="accuracy", most_drop=0.05)


async def fleet(world: World, names: Sequence[str] = NAMES) -> dict[str, Receiver]:
    """A run that waits for more clients than there are, and devices that take releases."""
    if not world.coordinator.runs():
        await world.coordinator.creation.create(run_config(round={"clients_per_round": 9}), "admin", None)
    return {name: await Receiver(name).connect(world) for name in names}


def admin(world: World) -> AdminService:
    """The calls of operators."""
    return AdminService(world.services, world.coordinator)


async def shown(world: World, version: int = 0) -> pb.GetReleaseResponse:
    """A release and its devices."""
    return await admin(world).GetRelease(pb.GetReleaseRequest(model=MODEL, version=version), NO_CONTEXT)


async def test_a_release_goes_to_a_stage_then_to_all_and_is_fetched(tmp_path: Path) -> None:
    """The devices of the stage are told; the others when an operator advances it; all fetch the same bytes."""
    async with World(tmp_path / "state") as world:
        devices = await fleet(world)
        status = await release(world, tmp_path, rules=HALF)
        assert (status.state, status.share, status.devices["waiting"]) == ("staged", 0.5, 2)
        await until(lambda: sum(bool(device.orders()) for device in devices.values()) == 2, "two devices are told")
        inside = [device for device in devices.values() if device.orders()]
        for device in inside:
            order = await device.told(1)
            data = await device.fetched(world, status.digest)
            assert len(data) == status.size_bytes
            assert order.description == description(data).to_bytes()
            await device.tells(world, 1)
        await admin(world).AdvanceRelease(pb.AdvanceReleaseRequest(model=MODEL), NO_CONTEXT)
        for device in devices.values():
            await device.told(1)
        now = (await shown(world)).release
        assert (now.state, dict(now.devices)) == ("released", {"evaluated": 2, "waiting": 2})
        assert now.metric_now == pytest.approx(0.9)
        events = [row.event for row in world.store.history("r")]
        assert events[-3:] == ["release_created", "release_advanced", "release_advanced"]


async def test_a_device_that_is_off_gets_it_when_it_is_back_and_others_take_none(tmp_path: Path) -> None:
    """A device is told at each Attend until it has reported; one whose owner takes none, or has other labels, never."""
    async with World(tmp_path / "state") as world:
        devices = await fleet(world, ["a"])
        none, other = await Device("none", works=False).connect(world), await Receiver("other").connect(world)
        devices["a"].labels = {"site": "north"}
        await devices["a"].leave()
        await devices["a"].connect(world)
        await devices["a"].leave()
        status = await release(world, tmp_path, labels={"site": "north"})
        assert dict(status.devices) == {"waiting": 1}
        await devices["a"].connect(world)
        await devices["a"].told(1)
        await devices["a"].leave()
        await devices["a"].connect(world)
        await until(lambda: devices["a"].orders() == [1, 1], "told again")
        await devices["a"].tells(world, 1)
        await devices["a"].leave()
        await devices["a"].connect(world)
        late = await Receiver("late", labels={"site": "north"}).connect(world)
        await late.told(1)
        assert devices["a"].orders() == [1, 1]
        assert not none.pushed("release")
        assert not other.orders()


async def test_too_many_failures_take_every_device_back(tmp_path: Path) -> None:
    """Of four devices one may fail; the second is one that got worse. All go back to version 1, and are noted."""
    async with World(tmp_path / "state") as world:
        devices = await fleet(world)
        await release(world, tmp_path)
        for device in devices.values():
            await device.told(1)
            await device.tells(world, 1)
        rules = pb.ReleaseRules(stages=[1.0], most_failed=0.25, metric="accuracy", most_drop=0.05)
        await release(world, tmp_path, 2, rules)
        for device in devices.values():
            await device.told(2)
        await devices["a"].tells(world, 2, "REFUSED", detail="expected a signature")
        await devices["b"].tells(world, 2, metrics={"accuracy": 0.89}, metrics_before={"accuracy": 0.9})
        assert (await shown(world)).release.state == "released"
        await devices["c"].tells(world, 2, metrics={"accuracy": 0.5}, metrics_before={"accuracy": 0.9})
        now = (await shown(world, 2)).release
        assert (now.state, now.fell, now.reason) == ("rolled_back", 1, "2 of 4 devices failed or fell, more than 25%")
        for device in devices.values():
            if device.held[MODEL] == 2:
                await device.told(1)
                await device.tells(world, 1)
        assert dict((await shown(world, 2)).release.devices) == {"refused": 1, "returned": 2, "waiting": 1}
        rows = [row for row in world.store.history("r") if row.event == "release_rolled_back"]
        assert [row.actor for row in rows] == ["coordinator"]


async def test_a_device_that_installs_a_version_while_it_is_taken_back_goes_back(tmp_path: Path) -> None:
    """Its report comes after the others were told."""
    async with World(tmp_path / "state") as world:
        devices = await fleet(world, ["a"])
        for version in (1, 2):
            await release(world, tmp_path, version)
            await devices["a"].told(version)
            if version == 1:
                await devices["a"].tells(world, 1)
        await admin(world).RollBackRelease(pb.RollBackReleaseRequest(model=MODEL), NO_CONTEXT)
        await devices["a"].tells(world, 2, "INSTALLED")
        await devices["a"].told(1)
        await devices["a"].tells(world, 1)
        assert dict((await shown(world, 2)).release.devices) == {"returned": 1}
        assert devices["a"].orders() == [1, 2, 1]


async def test_a_stage_begins_by_itself_also_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time, once half of its devices have reported. A release that nobody reported stays."""
    monkeypatch.setattr(staging, "TICK_S", 0.05)
    rules = pb.ReleaseRules(stages=[0.5, 1.0], most_failed=0.5, advance_after_s=0.01)
    async with World(tmp_path / "state") as world:
        await fleet(world)
        status = await release(world, tmp_path, rules=rules)
        assert status.share == 0.5
    async with World(tmp_path / "state") as world:
        devices = await fleet(world)
        kept = world.coordinator.releases.find(MODEL)
        for device in devices.values():
            if device.name in kept.release.devices:
                await device.told(1)
                assert kept.release.share == 0.5
                await device.tells(world, 1)
        await until(lambda: kept.release.share == 1, "the last stage has begun")


async def test_a_release_belongs_to_the_owner_of_its_run(tmp_path: Path) -> None:
    """Other operators neither see nor change it, a viewer sees it, an admin changes it."""
    async with World(tmp_path / "state") as world:
        mine = run_config(round={"clients_per_round": 9}, owner="alice")
        await world.coordinator.creation.create(mine, "operator:alice", None)
        with calling_as(ALICE):
            await release(world, tmp_path, rules=HALF)
        for who, sees in ((ALICE, True), (BOB, False), (EYES, True), (ROOT, True)):
            with calling_as(who):
                listed = await admin(world).ListReleases(pb.ListReleasesRequest(), NO_CONTEXT)
                assert (len(listed.releases) == 1) is sees
        with calling_as(BOB), pytest.raises(NoSuchRelease):
            await shown(world)
        with calling_as(BOB), pytest.raises(NoSuchRelease):
            await admin(world).AdvanceRelease(pb.AdvanceReleaseRequest(model=MODEL), NO_CONTEXT)
        with calling_as(ROOT):
            await admin(world).RollBackRelease(pb.RollBackReleaseRequest(model=MODEL), NO_CONTEXT)


async def test_an_operator_takes_the_only_version_back(tmp_path: Path) -> None:
    """Its devices are told to use none."""
    async with World(tmp_path / "state") as world:
        devices = await fleet(world, ["a"])
        await release(world, tmp_path)
        await devices["a"].told(1)
        await devices["a"].tells(world, 1)
        await admin(world).RollBackRelease(pb.RollBackReleaseRequest(model=MODEL, reason="wrong run"), NO_CONTEXT)
        await devices["a"].told(0)
        assert (await shown(world)).release.reason == "wrong run"
        with pytest.raises(WrongRelease, match="rolled back already"):
            await admin(world).RollBackRelease(pb.RollBackReleaseRequest(model=MODEL), NO_CONTEXT)


async def test_what_cannot_be_released_is_refused_with_the_reason(tmp_path: Path) -> None:
    """And leaves nothing behind."""
    async with World(tmp_path / "state") as world:
        await fleet(world)
        with pytest.raises(WrongRelease, match="expected version 1 of 'tiny', got 7"):
            await release(world, tmp_path, 7)
        with pytest.raises(InvalidInput, match="rising shares"):
            await release(world, tmp_path, rules=pb.ReleaseRules(stages=[0.5]))
        with pytest.raises(NoSuchRelease, match="no release of a model 'tiny'"):
            await shown(world)
        await release(world, tmp_path, rules=HALF)
        with pytest.raises(WrongRelease, match="advance it to 100%, or roll it back"):
            await release(world, tmp_path, 2)
        with pytest.raises(WrongRelease, match="a larger share of at most 100%"):
            await admin(world).AdvanceRelease(pb.AdvanceReleaseRequest(model=MODEL, share=0.2), NO_CONTEXT)


@pytest.mark.parametrize("each", [8, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_killed_coordinator_goes_on_with_a_release(tmp_path: Path, each: int) -> None:
    """Killed after each write in turn, and started again: in the end all devices have version 1, then 2, then 1.

    each: every so many writes.
    """
    uninterrupted = Journal()
    writes = await _until_rolled_back(tmp_path / "whole", tmp_path, uninterrupted)
    assert writes.count("save_release") >= 10
    kills = [number for number, name in enumerate(writes, 1) if name in {"add_release", "save_release"}]
    for number in kills[::each]:
        await _until_rolled_back(tmp_path / f"killed-{number}", tmp_path, Journal(dies_at=number))


async def _until_rolled_back(state: Path, folder: Path, journal: Journal) -> list[str]:
    """Release two versions to three devices, with a restart wherever the journal ends the process."""
    held: dict[str, dict[str, int]] = {name: {} for name in "abc"}
    writes: list[str] = []
    while True:
        world = World(state, journal)
        try:
            async with world:
                await _play(world, folder, held)
                writes += journal.writes
                return writes
        except Killed:
            writes += journal.writes
            journal = Journal()


async def _play(world: World, folder: Path, held: dict[str, dict[str, int]]) -> None:
    """What an operator does until version 2 is rolled back; each step only if it is not done yet."""
    await fleet(world, [])
    devices = [await Receiver(name, held=held[name]).connect(world) for name in held]

    async def all_use(version: int) -> None:
        for device in devices:
            if device.held.get(MODEL) != version:
                await device.told(version)
                await device.tells(world, version)

    for version in (1, 2):
        if version not in {kept.record.version for kept in world.coordinator.releases.of(MODEL)}:
            await release(world, folder, version, HALF)
        newest = world.coordinator.releases.of(MODEL)[0]
        if newest.release.version == version and newest.release.share < 1:
            await admin(world).AdvanceRelease(pb.AdvanceReleaseRequest(model=MODEL), NO_CONTEXT)
        if newest.release.version == version and not newest.release.rolled_back:
            await all_use(version)
    if not world.coordinator.releases.of(MODEL)[0].release.rolled_back:
        await admin(world).RollBackRelease(pb.RollBackReleaseRequest(model=MODEL, version=2), NO_CONTEXT)
    await all_use(1)
    await until(
        lambda: (
            {device.state.value for device in world.coordinator.releases.find(MODEL, 2).release.devices.values()}
            == {"returned"}
        ),
        "all devices are back",
    )
