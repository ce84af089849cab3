"""Releases models to devices: carries out what `fl_server.rounds.releases` decides. Lives on the event loop.

A change is written before devices are told. A device is told at each Attend until it has reported the version that it
should use, so what a killed coordinator has not sent is sent after its start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ParamSpec

import structlog

from fl_common.released import Description, parse_description
from fl_server.aggregation.outgoing import Broadcast, plain_broadcast
from fl_server.clients.draw_rules import Requirements, labelled_offers
from fl_server.errors import NoSuchRelease, WrongRelease, one_line
from fl_server.identity import actor
from fl_server.rounds import releases as core
from fl_server.rounds.releases import Device, DeviceState, Release
from fl_server.services import Services
from fl_server.store.database.ledger_releases import ReleaseRecord
from fl_server.store.errors import StoreError
from fl_server.store.records import ClientRecord, HistoryRecord
from fl_server.store.uploaded_models import ReleaseFiles
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_RELEASE

log = structlog.get_logger()

P = ParamSpec("P")

KEPT = 4
"""Newest versions of a model that devices may still be sent: one can go back to the ones before."""
TICK_S = 5.0
"""Between two looks at the stages that begin by themselves."""
COORDINATOR = "coordinator"
_DONE = frozenset({DeviceState.EVALUATED, DeviceState.NOT_EVALUATED})
_NOT_IN_USE = frozenset({DeviceState.REFUSED, DeviceState.FAILED})


@dataclass(slots=True)
class Kept:
    """A release that devices may still be sent."""

    record: ReleaseRecord
    description: Description
    release: Release
    broadcast: Broadcast | None = None
    """Its bytes. None: they cannot be read."""

    def fits(self, client: ClientRecord) -> bool:
        """Whether the release is for this device."""
        wanted = Requirements({"name": self.description.task}, self.description.labels)
        return client.releases and not client.banned and any(labelled_offers(wanted, client))


class Releases:
    """The newest releases of all models of one coordinator."""

    def __init__(self, services: Services) -> None:
        self._services, self._ledger, self._fleet = services, services.ledger, services.fleet
        self._files = ReleaseFiles(services.config.state_dir, services.files)
        self._kept: dict[tuple[str, int], Kept] = {}
        self._changing = asyncio.Lock()
        """Held while a release changes, so that the ledger and the release here agree."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._records = self._fleet.records.in_memory()
        for state in DeviceState:
            services.metrics.release_devices.labels(state.value).set_function(partial(self._count, state))

    async def start(self) -> None:
        """Read the releases back."""
        for record in await self._ledger.do(self._ledger.store.releases):
            devices = await self._ledger.do(self._ledger.store.release_devices, record.model, record.version)
            self._keep(Kept(record, parse_description(record.description), record.release(devices)))
        await self._services.in_io(
            self._files.keep_only, [bytes.fromhex(kept.description.digest) for kept in self._kept.values()]
        )
        for kept in self.all():
            await self._open(kept)
            if kept.release.state == "staged" and not kept.release.share:  # the coordinator ended before it began
                await self._open_stage(kept, kept.release.rules.stages[0], COORDINATOR)

    def close(self) -> None:
        """Decide nothing any more."""
        for task in self._tasks:
            task.cancel()

    def all(self) -> list[Kept]:
        """The kept releases, the oldest first."""
        return sorted(self._kept.values(), key=lambda kept: (kept.record.created_at, *_key(kept)))

    def of(self, model: str) -> list[Kept]:
        """The kept releases of a model, the newest first."""
        return sorted((kept for kept in self._kept.values() if kept.record.model == model), key=_key, reverse=True)

    def find(self, model: str, version: int = 0) -> Kept:
        """A release. version: 0 for the newest that is not rolled back, else the newest. Raises NoSuchRelease."""
        newest = self.of(model)
        found = next((kept for kept in newest if kept.release.version == version), None)
        if not version:
            found = next((kept for kept in newest if not kept.release.rolled_back), newest[0] if newest else None)
        if found is None:
            raise NoSuchRelease(model, version)
        return found

    def broadcast(self, digest: bytes) -> Broadcast | None:
        """The bytes of a release with this digest, for clients."""
        broadcasts = (kept.broadcast for kept in self._kept.values())
        return next((found for found in broadcasts if found is not None and found.digest == digest), None)

    # What operators do.

    async def create(self, record: ReleaseRecord, upload: Path) -> Kept:
        """Add a release, whose signature and rules were checked, and begin its first stage. upload: its bytes.

        Raises WrongRelease, StoreError.
        """
        description = parse_description(record.description)
        async with self._changing:
            self._require_next(description)
            digest = bytes.fromhex(description.digest)
            if not await self._services.in_io(self._files.keep, upload, digest):
                raise WrongRelease(f"the bytes with the digest {description.digest} are not here: send them again")
            kept = Kept(record, description, record.release({}))
            await self._open(kept)
            if kept.broadcast is None or len(kept.broadcast.bundle) != description.size:
                raise WrongRelease("the bytes that were sent are not those of the description: send them again")
            detail = f"{description.model} {description.version}: {description.form}, signed by {record.signer}"
            row = HistoryRecord(record.created_at, actor(), "release_created", description.run, detail)
            await self._ledger.do(self._ledger.store.add_release, record, row)
            self._keep(kept)
        await self._open_stage(kept, kept.release.rules.stages[0], actor())
        return kept

    def _require_next(self, description: Description) -> None:
        """Raises WrongRelease unless the description is of the version that can come next."""
        newest = self.of(description.model)
        expected = newest[0].release.version + 1 if newest else 1
        if description.version != expected:
            raise WrongRelease(
                f"expected version {expected} of {description.model!r}, got {description.version}: make it again"
            )
        if newest and newest[0].release.state == "staged":
            raise WrongRelease(
                f"version {expected - 1} of {description.model!r} is at {core.share_text(newest[0].release.share)} of "
                f"its devices: advance it to 100%, or roll it back, before the next version"
            )

    async def advance(self, kept: Kept, share: float | None) -> None:
        """Begin a stage. share: None for the next one of the rules. Raises WrongRelease, StoreError."""
        share = kept.release.next_share if share is None else share
        if kept.release.rolled_back or share is None or not kept.release.share < share <= core.EVERYBODY:
            raise WrongRelease(
                f"version {kept.release.version} of {kept.release.model!r} is {kept.release.state.replace('_', ' ')} "
                f"({core.share_text(kept.release.share)}): a stage needs one that is not rolled back, and a larger "
                "share of at most 100%"
            )
        await self._open_stage(kept, share, actor())

    async def _open_stage(self, kept: Kept, share: float, who: str) -> None:
        await self._apply(kept, core.StageOpened(share, self._targets(kept), time.time()), who)

    async def roll_back(self, kept: Kept, reason: str) -> None:
        """Take a release back. Raises WrongRelease, StoreError."""
        if kept.release.rolled_back:
            raise WrongRelease(f"version {kept.release.version} of {kept.release.model!r} is rolled back already")
        await self._apply(kept, core.RollBack(one_line(reason) or "by hand"), actor())

    # What devices do.

    def client_attached(self, client: str) -> None:
        """A device has come: tell it which versions it should use."""
        session = self._fleet.sessions.of(client)
        if session is not None and session.releases is not None and self._kept:
            self._spawn(self._came, client)

    async def _came(self, client: str) -> None:
        for model in {kept.record.model for kept in self._kept.values()}:
            for kept in self.of(model):
                if (record := self._records.get(client)) is not None and kept.fits(record):
                    await self._apply(kept, core.DeviceCame(client))
            await self._note_version(client, model)
            self._tell(client, model)

    async def _note_version(self, client: str, model: str) -> None:
        """Note for releases that were rolled back that the device uses another version."""
        session = self._fleet.sessions.of(client)
        held = (session.releases or {}).get(model, 0) if session is not None else 0
        for kept in self.of(model):
            if kept.release.version != held:
                await self._apply(kept, core.Returned(client))

    def client_gone(self, client: str, reason: str) -> None:
        """A client is lost, banned or forgotten. The ledger has forgotten its part in releases already."""
        if reason == "forgotten":
            for kept in self._kept.values():
                self._spawn(self._apply, kept, core.Forgotten(client))

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
            if self._wanted(client, model) != version:  # it was taken back, or advanced, while the device installed it
                self._tell(client, model)

    # What the core decides.

    async def _apply(self, kept: Kept, event: core.Event, who: str = COORDINATOR) -> None:
        """Give the core an event, write what it changes, then tell devices. Raises StoreError."""
        async with self._changing:
            release, effects = core.advance(kept.release, event)
            clients = [client for effect in effects if isinstance(effect, core.DevicesChanged)
                       for client in effect.clients]  # fmt: skip
            whys = [HistoryRecord(time.time(), who, effect.event, kept.record.run_id, effect.detail)
                    for effect in effects if isinstance(effect, core.Changed)]  # fmt: skip
            if clients or whys:
                await self._ledger.do(self._ledger.store.save_release, release, clients, whys)
            kept.release = release
        if release.rolled_back and any(isinstance(effect, core.Changed) for effect in effects):
            by = "rule" if who == COORDINATOR else "operator"
            self._services.metrics.releases_rolled_back.labels(by).inc()
        for why in whys:
            log.info(why.event, run=why.subject, actor=why.actor, detail=why.detail)
        for effect in effects:
            if isinstance(effect, core.Tell):
                for client in effect.clients:
                    self._tell(client, release.model)
            elif isinstance(effect, core.StageDue):
                await self._open_stage(kept, effect.share, COORDINATOR)

    def _tell(self, client: str, model: str) -> None:
        """Tell an attached device which version of a model it should use, unless it has reported that it does."""
        session = self._fleet.sessions.of(client)
        if session is None or session.releases is None:
            return
        held, version = session.releases.get(model, 0), self._wanted(client, model)
        order = pb.ReleaseOrder(model=model, version=version)
        if version:
            kept = self._kept[model, version]
            device = kept.release.devices.get(client, Device())
            if held == version and device.state in _DONE:
                return
            order.description, order.signature = kept.record.description, kept.record.signature
        elif (model, held) not in self._kept:
            return  # it uses none, or one that is not from here
        self._fleet.streams.push(client, pb.AttendResponse(release=order))

    def _wanted(self, client: str, model: str) -> int:
        """The version of a model that a client should use; 0: none."""
        record, newest = self._records.get(client), self.of(model)
        fits = {kept.release.version: record is not None and kept.fits(record) for kept in newest}
        return core.wanted((kept.release for kept in newest), client, fits)

    def _targets(self, kept: Kept) -> list[str]:
        return [client for client, record in self._records.items() if kept.fits(record)]

    async def _tick(self) -> None:
        """Look at the stages that begin by themselves, for as long as there are any."""
        while any(kept.release.state == "staged" and kept.release.rules.advance_after_s for kept in self.all()):
            await asyncio.sleep(TICK_S)
            for kept in self.all():
                try:
                    await self._apply(kept, core.Ticked(time.time()))
                except StoreError as error:  # tried again at the next tick
                    log.warning("release_not_advanced", model=kept.record.model, error=str(error))

    def _count(self, state: DeviceState) -> float:
        """Devices in this state; in a scraper's thread."""
        newest: dict[str, Kept] = {}
        for kept in sorted(self._kept.copy().values(), key=_key):
            newest[kept.record.model] = kept
        devices = (device for kept in newest.values() for device in kept.release.devices.values())
        return float(sum(device.state is state for device in devices))

    # What is kept.

    def _keep(self, kept: Kept) -> None:
        self._kept[_key(kept)] = kept
        if kept.release.rules.advance_after_s and (self._ticking is None or self._ticking.done()):
            self._ticking = self._spawn(self._tick)
        for old in self.of(kept.record.model)[KEPT:]:
            del self._kept[_key(old)]

    async def _open(self, kept: Kept) -> None:
        """Open the bytes of a release. Without them its devices wait."""
        chunk_bytes = self._services.config.limits.chunk_bytes

        def opened() -> Broadcast:
            data = self._files.opened(bytes.fromhex(kept.description.digest))
            return plain_broadcast(RESOURCE_KIND_RELEASE, memoryview(data), chunk_bytes)

        try:
            kept.broadcast = await self._services.in_io(opened)
        except StoreError as error:
            log.error("release_not_readable", model=kept.record.model, version=kept.record.version, error=str(error))

    def _spawn(self, work: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> asyncio.Task[None]:
        task = asyncio.create_task(self._logged(partial(work, *args, **kwargs)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _logged(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except StoreError as error:  # a device that comes back, and the next tick, try again
            log.warning("release_not_written", error=str(error))


def _key(kept: Kept) -> tuple[str, int]:
    return kept.record.model, kept.record.version
