"""Models on their way to devices: what is particular to them among releases, see `fl_server.runs.staging`."""

from __future__ import annotations

from pathlib import Path

from fl_common.released import Description, parse_description
from fl_server.clients.draw_rules import Requirements, labelled_offers
from fl_server.identity import actor
from fl_server.rounds import releases as core
from fl_server.rounds.releases import Device, DeviceState, Kind
from fl_server.runs.staging import Kept, Staging
from fl_server.services import Services
from fl_server.store.database.ledger_releases import ReleaseRecord
from fl_server.store.records import ClientRecord, HistoryRecord
from fl_server.store.uploaded_models import RELEASES
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_RELEASE

_DONE = frozenset({DeviceState.EVALUATED, DeviceState.NOT_EVALUATED})
_NOT_IN_USE = frozenset({DeviceState.REFUSED, DeviceState.FAILED})


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
