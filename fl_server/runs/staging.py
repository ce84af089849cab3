"""Brings releases of one kind to devices: carries out what `fl_server.rounds.releases` decides. On the event loop.

A change is written before devices are told. A device is told at each Attend until it uses the version that it should,
so what a killed coordinator has not sent is sent after its start. `fl_server.runs.releases` does so for models,
`fl_server.runs.releases` for packages.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

import structlog

from fl_server.aggregation.outgoing import Broadcast, plain_broadcast
from fl_server.errors import NoSuchRelease, WrongRelease, one_line
from fl_server.identity import actor
from fl_server.rounds import releases as core
from fl_server.rounds.releases import Kind, Release
from fl_server.services import Services
from fl_server.store.database.ledger_clients import ReleaseRecord
from fl_server.store.errors import StoreError
from fl_server.store.records import ClientRecord, HistoryRecord
from fl_server.store.uploaded_models import ReleaseFiles
from protos.fl.v1 import tensor_pb2

log = structlog.get_logger()

D = TypeVar("D")
P = ParamSpec("P")

KEPT = 4
"""Newest versions of a name that devices may still be sent: one can go back to the ones before."""
TICK_S = 5.0
"""Between two looks at the releases that time changes."""
COORDINATOR = "coordinator"


@dataclass(slots=True)
class Kept(Generic[D]):
    """A release that devices may still be sent."""

    record: ReleaseRecord
    description: D
    """What was signed."""
    release: Release
    broadcast: Broadcast | None = None
    """Its bytes. None: they cannot be read."""


class Staging(ABC, Generic[D]):
    """The newest releases of one kind of one coordinator."""

    kind: Kind
    noun: str
    """What one name is the name of, for messages."""
    resource: tensor_pb2.ResourceKind

    def __init__(self, services: Services, folder: str) -> None:
        """folder: of the bytes, in the state directory."""
        self._services, self._ledger, self._fleet = services, services.ledger, services.fleet
        self._files = ReleaseFiles(services.config.state_dir, services.files, folder)
        self._kept: dict[tuple[str, int], Kept[D]] = {}
        self._changing = asyncio.Lock()
        """Held while a release changes, so that the ledger and the release here agree."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._records = self._fleet.records.in_memory()
        for state in core.DeviceState:
            devices = services.metrics.release_devices.labels(self.kind.value, state.value)
            devices.set_function(partial(self._count, state))

    async def start(self) -> None:
        """Read the releases back."""
        store = self._ledger.store
        for record in await self._ledger.do(store.releases, self.kind):
            devices = await self._ledger.do(store.release_devices, self.kind, record.name, record.version)
            self._keep(Kept(record, self._described(record), record.release(devices)))
        await self._services.in_io(self._files.keep_only, [kept.record.digest for kept in self._kept.values()])
        for kept in self.all():
            await self._open(kept)
            if kept.release.state == "staged" and not kept.release.share:  # the coordinator ended before it began
                await self._open_stage(kept, kept.release.rules.stages[0], COORDINATOR)

    def close(self) -> None:
        """Decide nothing any more."""
        for task in self._tasks:
            task.cancel()

    def all(self) -> list[Kept[D]]:
        """The kept releases, the oldest first."""
        return sorted(self._kept.values(), key=lambda kept: (kept.record.created_at, *_key(kept)))

    def of(self, name: str) -> list[Kept[D]]:
        """The kept releases of a name, the newest first."""
        return sorted((kept for kept in self._kept.values() if kept.record.name == name), key=_key, reverse=True)

    def names(self) -> set[str]:
        """The names of the kept releases."""
        return {kept.record.name for kept in self._kept.values()}

    def kept(self, name: str, version: int) -> Kept[D] | None:
        """A release that devices may still be sent; None for another one."""
        return self._kept.get((name, version))

    def find(self, name: str, version: int = 0) -> Kept[D]:
        """A release. version: 0 for the newest that is not rolled back, else the newest. Raises NoSuchRelease."""
        newest = self.of(name)
        named = next((kept for kept in newest if kept.release.version == version), None)
        if not version:
            named = next((kept for kept in newest if not kept.release.rolled_back), newest[0] if newest else None)
        if named is None:
            raise NoSuchRelease(name, version, self.noun)
        return named

    def broadcast(self, digest: bytes) -> Broadcast | None:
        """The bytes of a release with this digest, for clients."""
        broadcasts = (kept.broadcast for kept in self._kept.values())
        return next((found for found in broadcasts if found is not None and found.digest == digest), None)

    # What the kinds differ in.

    @abstractmethod
    def fits(self, kept: Kept[D], client: ClientRecord) -> bool:
        """Whether a release is for this device."""

    @abstractmethod
    def _described(self, record: ReleaseRecord) -> D:
        """What was signed."""

    @abstractmethod
    def _tell(self, client: str, name: str) -> None:
        """Tell a device, if it is attached, which version it should use, unless it does."""

    def _ticks(self, kept: Kept[D]) -> bool:
        """Whether time changes a release."""
        return kept.release.state == "staged" and kept.release.rules.advance_after_s > 0

    async def _tick(self, kept: Kept[D]) -> None:
        """Look at a release that time changes. Raises StoreError."""
        await self._apply(kept, core.Ticked(time.time()))

    # What operators do.

    async def _add(self, record: ReleaseRecord, upload: Path, size: int, why: HistoryRecord) -> Kept[D]:
        """Add a release, whose signature and rules were checked, and begin its first stage. upload: its bytes.

        Raises WrongRelease, StoreError.
        """
        async with self._changing:
            self._require_next(record)
            if not await self._services.in_io(self._files.keep, upload, record.digest):
                raise WrongRelease(f"the bytes with the digest {record.digest.hex()} are not here: send them again")
            kept = Kept(record, self._described(record), record.release({}))
            await self._open(kept)
            if kept.broadcast is None or len(kept.broadcast.bundle) != size:
                raise WrongRelease("the bytes that were sent are not those of the description: send them again")
            await self._ledger.do(self._ledger.store.add_release, record, why)
            self._keep(kept)
        await self._open_stage(kept, kept.release.rules.stages[0], actor())
        return kept

    def _require_next(self, record: ReleaseRecord) -> None:
        """Raises WrongRelease unless a version can come next."""
        newest = self.of(record.name)
        expected = newest[0].release.version + 1 if newest else 1
        if record.version != expected:
            raise WrongRelease(f"expected version {expected} of {record.name!r}, got {record.version}: make it again")
        if newest and newest[0].release.state == "staged":
            raise WrongRelease(
                f"version {expected - 1} of {record.name!r} is at {core.share_text(newest[0].release.share)} of "
                f"its devices: advance it to 100%, or roll it back, before the next version"
            )

    async def advance(self, kept: Kept[D], share: float | None) -> None:
        """Begin a stage. share: None for the next one of the rules. Raises WrongRelease, StoreError."""
        share = kept.release.next_share if share is None else share
        if kept.release.rolled_back or share is None or not kept.release.share < share <= core.EVERYBODY:
            raise WrongRelease(
                f"version {kept.release.version} of {kept.release.name!r} is {kept.release.state.replace('_', ' ')} "
                f"({core.share_text(kept.release.share)}): a stage needs one that is not rolled back, and a larger "
                "share of at most 100%"
            )
        await self._open_stage(kept, share, actor())

    async def _open_stage(self, kept: Kept[D], share: float, who: str) -> None:
        targets = [client for client, record in self._records.items() if self.fits(kept, record)]
        await self._apply(kept, core.StageOpened(share, targets, time.time()), who)

    async def roll_back(self, kept: Kept[D], reason: str) -> None:
        """Take a release back. Raises WrongRelease, StoreError."""
        if kept.release.rolled_back:
            raise WrongRelease(f"version {kept.release.version} of {kept.release.name!r} is rolled back already")
        await self._apply(kept, core.RollBack(one_line(reason) or "by hand"), actor())

    # What devices do.

    async def _came(self, client: str, name: str) -> None:
        """A device has come: what goes to all goes to it as well."""
        for kept in self.of(name):
            if (record := self._records.get(client)) is not None and self.fits(kept, record):
                await self._apply(kept, core.DeviceCame(client))

    def client_gone(self, client: str, reason: str) -> None:
        """A client is lost, banned or forgotten. The ledger has forgotten its part in releases already."""
        if reason == "forgotten":
            for kept in self._kept.values():
                self._spawn(self._apply, kept, core.Forgotten(client))

    # What the core decides.

    async def _apply(self, kept: Kept[D], event: core.Event, who: str = COORDINATOR) -> None:
        """Give the core an event, write what it changes, then tell devices. Raises StoreError."""
        async with self._changing:
            release, effects = core.advance(kept.release, event)
            clients = [client for effect in effects if isinstance(effect, core.DevicesChanged)
                       for client in effect.clients]  # fmt: skip
            subject = kept.record.run_id or kept.record.name
            whys = [HistoryRecord(time.time(), who, effect.event, subject, effect.detail)
                    for effect in effects if isinstance(effect, core.Changed)]  # fmt: skip
            if clients or whys:
                await self._ledger.do(self._ledger.store.save_release, release, clients, whys)
            kept.release = release
        if release.rolled_back and whys:
            by = "rule" if who == COORDINATOR else "operator"
            self._services.metrics.releases_rolled_back.labels(self.kind.value, by).inc()
        for why in whys:
            log.info(why.event, subject=why.subject, actor=why.actor, detail=why.detail)
        for effect in effects:
            if isinstance(effect, core.Tell):
                for client in effect.clients:
                    self._tell(client, release.name)
            elif isinstance(effect, core.StageDue):
                await self._open_stage(kept, effect.share, COORDINATOR)

    def wanted(self, client: str, name: str) -> int:
        """The version of a name that a client should use; 0: none."""
        record, newest = self._records.get(client), self.of(name)
        fits = {kept.release.version: record is not None and self.fits(kept, record) for kept in newest}
        return core.wanted((kept.release for kept in newest), client, fits)

    async def _look(self) -> None:
        """Look at the releases that time changes, for as long as there are any."""
        while any(map(self._ticks, self.all())):
            await asyncio.sleep(TICK_S)
            for kept in filter(self._ticks, self.all()):
                try:
                    await self._tick(kept)
                except StoreError as error:  # tried again at the next look
                    log.warning("release_not_advanced", name=kept.record.name, error=str(error))

    def _count(self, state: core.DeviceState) -> float:
        """Devices of the newest releases in this state; in a scraper's thread."""
        newest = {kept.record.name: kept for kept in sorted(self._kept.copy().values(), key=_key)}
        devices = (device for kept in newest.values() for device in kept.release.devices.values())
        return float(sum(device.state is state for device in devices))

    # What is kept.

    def _keep(self, kept: Kept[D]) -> None:
        self._kept[_key(kept)] = kept
        if self._ticks(kept) and (self._ticking is None or self._ticking.done()):
            self._ticking = self._spawn(self._look)
        for old in self.of(kept.record.name)[KEPT:]:
            del self._kept[_key(old)]

    async def _open(self, kept: Kept[D]) -> None:
        """Open the bytes of a release. Without them its devices wait."""
        chunk_bytes = self._services.config.limits.chunk_bytes

        def opened() -> Broadcast:
            return plain_broadcast(self.resource, memoryview(self._files.opened(kept.record.digest)), chunk_bytes)

        try:
            kept.broadcast = await self._services.in_io(opened)
        except StoreError as error:
            log.error("release_not_readable", name=kept.record.name, version=kept.record.version, error=str(error))

    def _spawn(self, work: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> asyncio.Task[None]:
        task = asyncio.create_task(self._logged(partial(work, *args, **kwargs)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _logged(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except StoreError as error:  # a device that comes back, and the next look, try again
            log.warning("release_not_written", error=str(error))


def _key(kept: Kept[D]) -> tuple[str, int]:
    return kept.record.name, kept.record.version
