"""Packages of a whole coordinator: who is offered which version, whose work counts, and what takes one back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from fl_common.packages import unpack
from fl_ops.admin.client import model_parts
from fl_server.errors import InvalidInput, WrongRelease
from fl_server.rpc.admin import AdminService
from fl_server.runs import staging
from protos.codec import digest_message
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import coordinator_pb2
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import TASK, Journal, Killed, World, until
from tests.fl_server.released import signing_key
from tests.processes.wheels import package, wheel

NAMES = ("a", "b", "c", "d")
PACKAGE = "waves"
HALF = pb.ReleaseRules(stages=[0.5, 1.0], most_failed=0.25, most_rise=0.1)
ALL = pb.ReleaseRules(stages=[1.0], most_failed=0.25, most_rise=0.1)
SECTIONS: dict[str, Any] = {
    "round": {"clients_per_round": 4, "min_clients": 4, "quorum": 1, "min_accepted": 1}, "stop": {"rounds": 10_000}
}  # fmt: skip


def data_of(version: int) -> bytes:
    """The file of a version."""
    return package([wheel(PACKAGE, {"waves.py": f"VERSION = {version}\n"})], signing_key())


def digest_of(version: int) -> str:
    """The digest by which devices and runs name a version."""
    return unpack(data_of(version))[0].digest


VERSIONS = {digest_of(version): version for version in range(1, 4)} | {"": 0}


@dataclass
class Site(Device):
    """A device with data for the package. It runs what it is told, at its next registration."""

    works: bool = False
    version: int = 0
    refuses: tuple[int, str] = (0, "")
    """The version that it refuses, and the rule."""

    def registration(self, **changes: Any) -> coordinator_pb2.RegisterRequest:
        """With the package that it runs, and the one that it refuses."""
        request = super().registration(packages=[PACKAGE], **changes)
        if self.version:
            request.tasks[0].package = digest_of(self.version)
        if self.refuses[0]:
            digest, rule = digest_of(self.refuses[0]), self.refuses[1]
            request.package_refusals.add(name=PACKAGE, digest=digest, rule=rule, detail=f"{digest}: {rule}")
        return request

    def offers(self) -> list[int]:
        """The versions that it was told to use, in order."""
        return [VERSIONS[offer.digest] for offer in self.pushed("package")]

    async def takes(self, world: World, version: int) -> None:
        """Run a version, once it is told to."""
        await until(lambda: self.offers()[-1:] == [version], f"{self.name} is offered {version}, not {self.offers()}")
        self.version = version
        await self.again(world)

    async def again(self, world: World) -> None:
        """Register again."""
        await self.leave()
        await self.connect(world)


def admin(world: World) -> AdminService:
    """The calls of operators."""
    return AdminService(world.services, world.coordinator)


async def add(world: World, folder: Path, version: int, rules: pb.ReleaseRules = ALL) -> pb.ReleaseStatus:
    """Release a version, as `fl packages add` does."""
    data = data_of(version)
    (folder / "file").write_bytes(data)
    with (folder / "file").open("rb") as file:
        parts = list(model_parts(file, release=True))

    async def requests() -> Any:
        for part in parts:
            yield part

    await admin(world).UploadModel(requests(), NO_CONTEXT)
    request = pb.AddPackageRequest(digest=digest_message(blake3(data).digest()), rules=rules)
    return (await admin(world).AddPackage(request, NO_CONTEXT)).release


async def shown(world: World, version: int = 0) -> pb.ReleaseStatus:
    """A version with its devices by state."""
    request = pb.GetReleaseRequest(model=PACKAGE, version=version, kind="package")
    return (await admin(world).GetRelease(request, NO_CONTEXT)).release


async def fleet(world: World, folder: Path, names: Sequence[str] = NAMES) -> dict[str, Site]:
    """Devices that run version 1."""
    sites = {name: await Site(name).connect(world) for name in names}
    await add(world, folder, 1)
    for site in sites.values():
        await site.takes(world, 1)
    return sites


def staged(world: World, version: int = 2) -> set[str]:
    """The devices that a version went to."""
    return set(world.coordinator.packages.find(PACKAGE, version).release.devices)


async def stage(world: World, folder: Path, sites: dict[str, Site], version: int = 2) -> set[str]:
    """Release a version to half of the devices, which run it."""
    await add(world, folder, version, HALF)
    inside = staged(world, version)
    for name in inside:
        await sites[name].takes(world, version)
    return inside


async def test_a_stage_has_the_new_version_and_the_others_keep_the_one_before(tmp_path: Path) -> None:
    """The stage stays when devices come back; a device that comes new has the version before; then all are told."""
    async with World(tmp_path / "state") as world:
        sites = await fleet(world, tmp_path)
        inside = await stage(world, tmp_path, sites)
        assert len(inside) == 2
        late = await Site("late").connect(world)
        for site in (*sites.values(), late):
            await site.again(world)
            assert site.offers()[-1] == (2 if site.name in inside else 1)
        status = await shown(world)
        assert (status.state, status.share, dict(status.devices)) == ("staged", 0.5, {"installed": 2})
        assert (status.kind, status.package.version, status.package.digest) == ("package", "1.0", digest_of(2))
        request = pb.AdvanceReleaseRequest(model=PACKAGE, kind="package")
        assert (await admin(world).AdvanceRelease(request, NO_CONTEXT)).release.state == "released"
        for site in (*sites.values(), late):
            await site.takes(world, 2)
        assert dict((await shown(world)).devices) == {"installed": 5}
        events = [row.event for row in world.store.history(PACKAGE)]
        assert events == ["package_added", "package_advanced", "package_added", "package_advanced", "package_advanced"]


async def test_more_failed_work_takes_a_version_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both devices of the stage fail and the others deliver, in one round: all go back to version 1."""
    monkeypatch.setattr(staging, "TICK_S", 0.02)
    async with World(tmp_path / "state") as world:
        sites = await fleet(world, tmp_path)
        inside = await stage(world, tmp_path, sites)
        await world.create(**SECTIONS)
        for name, site in sites.items():
            assignment = await site.assigned()
            if name in inside:
                await site.report_failure(world, assignment, coordinator_pb2.FAILURE_REASON_TASK_ERROR)
            else:
                await site.contribute(world, assignment)
        await until(lambda: world.coordinator.packages.find(PACKAGE, 2).release.rolled_back, "version 2 is taken back")
        status = await shown(world, 2)
        assert status.reason == "failed work rose by more than 10%: 2 of 2, with the version before 0 of 2"
        assert (status.package.work.failed, status.package.work_before.ended) == (2, 2)
        for name in inside:
            await sites[name].takes(world, 1)
        await until(
            lambda: (
                {device.state for device in world.coordinator.packages.find(PACKAGE, 2).release.devices.values()}
                == {"returned"}
            ),
            "both are back",
        )
        assert world.metric("fl_releases_rolled_back_total", kind="package", by="rule") == 1
        assert world.metric("fl_release_devices", kind="package", state="returned") == 2
        assert [row.actor for row in world.store.history(PACKAGE) if row.event == "package_rolled_back"] == [
            "coordinator"
        ]


async def test_a_run_that_pins_a_version_draws_its_stage_and_another_run_draws_all(tmp_path: Path) -> None:
    """All have the same task code here; a round of the run that pins nothing mixes the versions."""
    async with World(tmp_path / "state") as world:
        sites = await fleet(world, tmp_path)
        inside = await stage(world, tmp_path, sites)
        pinned = {"name": TASK, "options": sites["a"].options, "package": digest_of(2)}
        run = await world.create(name="pinned", task=pinned, round={"clients_per_round": 2, "min_clients": 2})
        for name in inside:
            assert (await sites[name].assigned()).key.run_id == "pinned"
        assert not any(site.pushed("assignment") for name, site in sites.items() if name not in inside)
        await world.coordinator.actions.stop(run, "enough", "admin")
        await world.create(name="all", **SECTIONS)
        for site in sites.values():
            await until(
                lambda site=site: {each.key.run_id for each in site.pushed("assignment")} >= {"all"},  # type: ignore[misc]  # one
                f"{site.name} is drawn",
            )


@pytest.mark.parametrize("reason", ["FAILURE_REASON_FINGERPRINT", "FAILURE_REASON_STOPPED", "FAILURE_REASON_POLICY"])
async def test_work_that_the_code_did_not_fail_says_nothing_of_its_package(tmp_path: Path, reason: str) -> None:
    """The daemon stops, its site refuses the run, or the assignment was for other code."""
    async with World(tmp_path / "state") as world:
        sites = await fleet(world, tmp_path, ["a"])
        await world.create(round={"clients_per_round": 1, "min_clients": 1, "min_accepted": 1})
        failed: coordinator_pb2.FailureReason = coordinator_pb2.FailureReason.Value(reason)  # type: ignore[assignment]  # one
        await sites["a"].report_failure(world, await sites["a"].assigned(), failed)
        assert world.store.client("a").work.failed == 1
        assert world.store.client("a").work.packages == {}


@pytest.mark.parametrize("wish", ["approval", "revoked", "signers"])
async def test_a_bad_package_is_taken_back_and_one_that_a_site_does_not_allow_waits(tmp_path: Path, wish: str) -> None:
    """Of two devices in the stage a quarter may be bad."""
    async with World(tmp_path / "state") as world:
        sites = await fleet(world, tmp_path)
        await add(world, tmp_path, 2, HALF)
        first, second = sorted(staged(world))
        for name, rule in ((first, wish), (second, "record")):
            assert (await shown(world)).state == "staged"
            sites[name].refuses = 2, rule
            await sites[name].again(world)
        await until(lambda: world.coordinator.packages.find(PACKAGE, 2).release.rolled_back, "version 2 is taken back")
        request = pb.GetReleaseRequest(model=PACKAGE, version=2, kind="package")
        devices = (await admin(world).GetRelease(request, NO_CONTEXT)).devices
        expected = [(first, "waiting", f"{digest_of(2)}: {wish}"), (second, "refused", f"{digest_of(2)}: record")]
        assert [(device.client_id, device.state, device.detail) for device in devices] == expected


async def test_the_only_version_is_taken_back_by_an_offer_of_none(tmp_path: Path) -> None:
    """The device uses none; a device that has none is not told."""
    async with World(tmp_path / "state") as world:
        sites = await fleet(world, tmp_path, ["a"])
        request = pb.RollBackReleaseRequest(model=PACKAGE, kind="package", reason="leaks")
        await admin(world).RollBackRelease(request, NO_CONTEXT)
        await sites["a"].takes(world, 0)
        new = await Site("new").connect(world)
        await new.again(world)
        assert new.offers() == []
        assert (await shown(world, 1)).reason == "leaks"


async def test_what_cannot_be_released_is_refused_with_the_reason(tmp_path: Path) -> None:
    """A metric, which no device measures of a package; a version beside a staged one; an unknown kind."""
    async with World(tmp_path / "state") as world:
        sites = await fleet(world, tmp_path)
        with pytest.raises(InvalidInput, match=r"rules\.metric"):
            await add(world, tmp_path, 2, pb.ReleaseRules(stages=[1.0], metric="accuracy"))
        await stage(world, tmp_path, sites)
        with pytest.raises(WrongRelease, match="advance it to 100%, or roll it back"):
            await add(world, tmp_path, 3)
        with pytest.raises(InvalidInput, match="model or package"):
            await admin(world).ListReleases(pb.ListReleasesRequest(kind="wheel"), NO_CONTEXT)


@pytest.mark.parametrize("each", [24, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_killed_coordinator_goes_on_with_a_package(
    tmp_path: Path, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after each write in turn, and started again: version 2 fails and is taken back, version 3 reaches all.

    each: every so many writes.
    """
    monkeypatch.setattr(staging, "TICK_S", 0.02)
    writes = await _until_released(tmp_path / "whole", tmp_path, Journal())
    assert {"add_release", "save_release", "record_update"} <= set(writes)
    of_packages = {"add_release", "save_release", "record_update", "put_failure"}
    kills = [number for number, name in enumerate(writes, 1) if name in of_packages]
    assert len(kills) >= 10
    for number in kills[::each]:
        await _until_released(tmp_path / f"killed-{number}", tmp_path, Journal(dies_at=number))


async def _until_released(state: Path, folder: Path, journal: Journal) -> list[str]:
    """Release three versions to four devices, with a restart wherever the journal ends the process."""
    versions = dict.fromkeys(NAMES, 0)
    writes: list[str] = []
    while True:
        world = World(state, journal)
        try:
            async with world:
                await _play(world, folder, versions)
                writes += journal.writes
                return writes
        except Killed:
            writes += journal.writes
            journal = Journal()


async def _play(world: World, folder: Path, versions: dict[str, int]) -> None:
    """What an operator and the devices do until version 3 is everywhere; each step only if it is not done yet.

    Raises Killed if the process ended, also in a task of its own.
    """
    packages = world.coordinator.packages
    if not world.coordinator.runs():
        await world.create(**SECTIONS)
    sites = [await Site(name, version=version).connect(world) for name, version in versions.items()]
    for version, rules in ((1, ALL), (2, HALF), (3, HALF)):
        if not packages.of(PACKAGE) or packages.of(PACKAGE)[0].record.version < version:
            await add(world, folder, version, rules)
        kept = packages.find(PACKAGE, version)
        for _ in range(3000):
            if world.journal.dead:
                raise Killed
            await _follow(world, sites, versions)
            if version < 3 and (version == 1 or kept.release.rolled_back):
                break
            await _work(world, sites)
            if version == 3 and kept.release.share < 1:
                await admin(world).AdvanceRelease(pb.AdvanceReleaseRequest(model=PACKAGE, kind="package"), NO_CONTEXT)
            if set(versions.values()) == {3}:
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError(f"version {version} stays {kept.release} with {packages.counted(kept)}")
    assert set(versions.values()) == {3}
    assert packages.find(PACKAGE, 2).release.reason.startswith("failed work rose")


async def _follow(world: World, sites: Sequence[Site], versions: dict[str, int]) -> None:
    """The devices run what they should."""
    for site in sites:
        version = world.coordinator.packages.wanted(site.name, PACKAGE)
        if site.version != version:
            await site.takes(world, version)
            versions[site.name] = version


async def _work(world: World, sites: Sequence[Site]) -> None:
    """The devices do the work that they have; with version 2 it fails."""
    for site in sites:
        assignments = site.pushed("assignment")
        site.messages = [message for message in site.messages if not message.HasField("assignment")]
        if assignments and site.version == 2:
            await site.report_failure(world, assignments[-1], coordinator_pb2.FAILURE_REASON_TASK_ERROR)
        elif assignments:
            await site.contribute(world, assignments[-1])
