"""Models and packages of task code on their way to devices: what is particular to each, see `fl_server.runs.staging`.

The coordinator checks what every device would refuse, and loads nothing of a package. A device says when it registers
which packages it runs and which ones it refuses. Work is counted by package: a version with which more of it fails than
with the version before is taken back.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from fl_common.packages import Manifest, PackageRefused, check_signers, check_wheels, unpack
from fl_common.released import Description, parse_description
from fl_server.clients.draw_rules import Requirements, labelled_offers
from fl_server.errors import InvalidInput
from fl_server.identity import actor
from fl_server.rounds import releases as core
from fl_server.rounds.releases import Device, DeviceState, Kind, Rules, Work
from fl_server.runs.staging import Kept, Staging
from fl_server.services import Services
from fl_server.store.database.ledger_clients import ReleaseRecord
from fl_server.store.errors import disk_errors
from fl_server.store.records import ClientRecord, HistoryRecord
from fl_server.store.uploaded_models import PACKAGES, RELEASES
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_PACKAGE, RESOURCE_KIND_RELEASE

_DONE = frozenset({DeviceState.EVALUATED, DeviceState.NOT_EVALUATED})
_NOT_IN_USE = frozenset({DeviceState.REFUSED, DeviceState.FAILED})
_STATES = {
    "approval": DeviceState.WAITING, "revoked": DeviceState.WAITING, "signers": DeviceState.WAITING,
    "start": DeviceState.FAILED,
}  # fmt: skip
"""What becomes of a package on a device, by the rule of its refusal; by all other rules it is refused. What site and
owner have not allowed says nothing of the package: one owner's decision takes it from no other device."""


class Releases(Staging[Description]):
    """The newest released versions of all models of one coordinator."""

    kind, noun, resource = Kind.MODEL, "model", RESOURCE_KIND_RELEASE

    def __init__(self, services: Services) -> None:
        super().__init__(services, RELEASES)

    def fits(self, kept: Kept[Description], client: ClientRecord) -> bool:
        """See Staging."""
        wanted = Requirements({"name": kept.description.task}, kept.description.labels)
        return client.releases and not client.banned and any(labelled_offers(wanted, client))

    def _described(self, record: ReleaseRecord) -> Description:
        return parse_description(record.description)

    async def create(self, record: ReleaseRecord, upload: Path) -> Kept[Description]:
        """Release a model, whose signature and rules were checked. Raises WrongRelease, StoreError."""
        said = parse_description(record.description)
        detail = f"{said.model} {said.version}: {said.form}, signed by {record.signer}"
        why = HistoryRecord(record.created_at, actor(), "release_created", said.run, detail)
        return await self._add(record, upload, said.size, why)

    def client_attached(self, client: str) -> None:
        """A device has come: tell it which versions it should use."""
        session = self._fleet.sessions.of(client)
        if session is not None and session.releases is not None and self._kept:
            self._spawn(self._attached, client)

    async def _attached(self, client: str) -> None:
        for model in self.names():
            await self._came(client, model)
            await self._note_version(client, model)
            self._tell(client, model)

    async def _note_version(self, client: str, model: str) -> None:
        """Note for releases that were rolled back that the device uses another version."""
        session = self._fleet.sessions.of(client)
        held = (session.releases or {}).get(model, 0) if session is not None else 0
        for kept in self.of(model):
            if kept.release.version != held:
                await self._apply(kept, core.Returned(client))

    async def report(self, client: str, model: str, version: int, device: Device) -> None:
        """Take what became of a version on a device. A report about a version that is not kept is ignored."""
        session = self._fleet.sessions.of(client)
        in_use = device.state not in _NOT_IN_USE
        if session is not None and session.releases is not None and in_use and self.of(model):
            session.releases[model] = version
        if (kept := self._kept.get((model, version))) is not None:
            await self._apply(kept, core.Reported(client, device))
        if in_use:
            await self._note_version(client, model)
            if self.wanted(client, model) != version:  # it was taken back, or advanced, while the device installed it
                self._tell(client, model)

    def _tell(self, client: str, name: str) -> None:
        session = self._fleet.sessions.of(client)
        if session is None or session.releases is None:
            return
        held, version = session.releases.get(name, 0), self.wanted(client, name)
        order = pb.ReleaseOrder(model=name, version=version)
        if version:
            kept = self._kept[name, version]
            device = kept.release.devices.get(client, Device())
            if held == version and device.state in _DONE:
                return
            order.description, order.signature = kept.record.description, kept.record.signature
        elif (name, held) not in self._kept:
            return  # it uses none, or one that is not from here
        self._fleet.streams.push(client, pb.AttendResponse(release=order))


class Packages(Staging[Manifest]):
    """The newest versions of all packages of one coordinator."""

    kind, noun, resource = Kind.PACKAGE, "package", RESOURCE_KIND_PACKAGE

    def __init__(self, services: Services) -> None:
        super().__init__(services, PACKAGES)

    def fits(self, kept: Kept[Manifest], client: ClientRecord) -> bool:
        """See Staging."""
        return kept.record.name in client.packages and not client.banned

    def _described(self, record: ReleaseRecord) -> Manifest:
        return Manifest.model_validate_json(record.description)

    async def create(self, upload: Path, digest: bytes, rules: Rules) -> Kept[Manifest]:
        """Release an uploaded package. Raises InvalidInput for one that devices refuse, WrongRelease, StoreError."""
        try:
            manifest, size = await self._services.in_io(_checked, upload, digest)
        except PackageRefused as error:
            raise InvalidInput("digest", "a package that devices accept", error) from error
        now, newest = time.time(), self.of(manifest.name)
        record = ReleaseRecord(
            Kind.PACKAGE,
            manifest.name,
            newest[0].record.version + 1 if newest else 1,
            "",
            "",
            manifest.model_dump_json().encode(),
            bytes.fromhex(manifest.signature),
            manifest.signer,
            digest,
            now,
            asdict(rules),
        )
        why = HistoryRecord(now, actor(), "package_added", manifest.name, manifest.title)
        return await self._add(record, upload, size, why)

    # What devices do.

    def client_attached(self, client: str) -> None:
        """A device has come: note what it runs and refuses, and tell it which packages it should run."""
        session = self._fleet.sessions.of(client)
        if session is not None and session.packages and self._kept:
            self._spawn(self._attached, client, sorted(session.packages & self.names()))

    async def _attached(self, client: str, names: Iterable[str]) -> None:
        for name in names:
            await self._came(client, name)
            for kept in self.of(name):
                await self._note(client, kept)
            self._tell(client, name)

    async def _note(self, client: str, kept: Kept[Manifest]) -> None:
        """Note what the device has said of a package when it registered."""
        session, digest = self._fleet.sessions.of(client), kept.description.digest
        if session is None:
            return
        if digest in self._running(client):
            await self._apply(kept, core.Reported(client, Device(DeviceState.INSTALLED, reported_at=time.time())))
        elif (refusal := session.package_refusals.get(digest)) is not None:
            state = _STATES.get(refusal[0], DeviceState.REFUSED)
            await self._apply(kept, core.Reported(client, Device(state, refusal[1], reported_at=time.time())))
        elif (device := kept.release.devices.get(client)) is not None and device.state not in core.BAD:
            await self._apply(kept, core.Returned(client))

    def _running(self, client: str) -> set[str]:
        """Digests of the packages that the device runs."""
        record = self._records.get(client)
        return set() if record is None else {offer["package"] for offer in record.tasks if "package" in offer}

    def _tell(self, client: str, name: str) -> None:
        session = self._fleet.sessions.of(client)
        if session is None or name not in session.packages:
            return
        offer = pb.PackageOffer(name=name)
        if version := self.wanted(client, name):
            kept = self._kept[name, version]
            if kept.broadcast is None:
                return
            offer.digest = kept.description.digest
            offer.resource.CopyFrom(kept.broadcast.resource)
        elif self._running(client).isdisjoint(kept.description.digest for kept in self.of(name)):
            return  # it runs none, or one that is not from here
        self._fleet.streams.push(client, pb.AttendResponse(package=offer))

    # What work shows.

    def counted(self, kept: Kept[Manifest]) -> tuple[Work, Work | None]:
        """Work with a package, of its devices; and with the version before it, of all devices. None: there is none."""
        devices, digest = kept.release.devices, kept.description.digest
        work = self._work(digest, (client for client, device in devices.items() if device.state not in core.BAD))
        earlier = (other for other in self.of(kept.record.name) if other.record.version < kept.record.version)
        before = next((other for other in earlier if not other.release.rolled_back), None)
        return work, None if before is None else self._work(before.description.digest, self._records)

    def _work(self, digest: str, clients: Iterable[str]) -> Work:
        counts = (self._fleet.work.of(client).packages.get(digest) for client in clients)
        return sum((Work(ended, failed, 1) for ended, failed in filter(None, counts)), Work())

    def _ticks(self, kept: Kept[Manifest]) -> bool:
        """The version that devices use, too: its work is compared also when all devices have it."""
        used = next((other for other in self.of(kept.record.name) if not other.release.rolled_back), None)
        return kept is used

    async def _tick(self, kept: Kept[Manifest]) -> None:
        await self._apply(kept, core.WorkCounted(*self.counted(kept)))
        await super()._tick(kept)


def _checked(upload: Path, digest: bytes) -> tuple[Manifest, int]:
    """The manifest of an uploaded package that devices accept, and the size of its file. Raises PackageRefused."""
    with disk_errors("read an uploaded package"):
        if not upload.is_file():
            raise PackageRefused("upload", f"expected an upload with the digest {digest.hex()}: send it again")
        data = upload.read_bytes()
    manifest, wheels = unpack(data)
    check_signers(manifest, {manifest.signer, *(wheel.signer for wheel in manifest.wheels)})
    check_wheels(manifest, wheels)
    return manifest, len(data)
