"""Packages of task code that operators have added: their files, and which one devices are offered.

    packages/000001.HEX.package     the number rises with each; HEX: BLAKE3-256 of the file

The newest one of each name is offered to the devices whose settings name it. A file is here, and in the object store
if there is one, before the first device hears of it, so a coordinator that was killed offers what it had. The
coordinator checks what every device would refuse, and loads nothing of it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from fl_common.files import fsync_path, make_folders
from fl_common.packages import Manifest, PackageRefused, check_signers, check_wheels, unpack
from fl_server.aggregation.outgoing import Broadcast, plain_broadcast
from fl_server.errors import InvalidInput
from fl_server.identity import actor
from fl_server.services import Services
from fl_server.store.errors import StoreError
from fl_server.store.files import disk_errors
from fl_server.store.records import HistoryRecord
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_PACKAGE

log = structlog.get_logger()

FOLDER = "packages"
_ENDING = ".package"


@dataclass(frozen=True, slots=True)
class Package:
    """A package of the coordinator."""

    number: int
    manifest: Manifest
    broadcast: Broadcast

    @property
    def offer(self) -> pb.AttendResponse:
        """What devices are told."""
        offer = pb.PackageOffer(name=self.manifest.name, digest=self.manifest.digest, resource=self.broadcast.resource)
        return pb.AttendResponse(package=offer)


class Packages:
    """All packages of one coordinator. Lives on the event loop; files in threads."""

    def __init__(self, services: Services) -> None:
        self._services, self._folder = services, services.config.state_dir / FOLDER
        self._all: list[Package] = []
        self._adding = asyncio.Lock()

    async def start(self) -> None:
        """Read the packages back."""
        self._all = await self._services.in_io(self._read_all)

    def all(self) -> list[Package]:
        """The packages, the newest first."""
        return self._all[::-1]

    def current(self) -> dict[str, Package]:
        """The newest package of each name."""
        return {package.manifest.name: package for package in self._all}

    def devices(self, digest: str) -> int:
        """The number of devices that have registered a task from a package."""
        records = self._services.fleet.records.in_memory().values()
        return sum(any(offer.get("package") == digest for offer in record.tasks) for record in records)

    def broadcast(self, digest: bytes) -> Broadcast | None:
        """The file with this digest, for devices."""
        return next((each.broadcast for each in self._all if each.broadcast.digest == digest), None)

    async def add(self, upload: Path, digest: bytes) -> Package:
        """Add an uploaded package, and offer it. Raises InvalidInput for one that devices refuse, StoreError."""
        async with self._adding:
            number = self._all[-1].number + 1 if self._all else 1
            try:
                package = await self._services.in_io(self._keep, upload, digest, number)
            except PackageRefused as error:
                raise InvalidInput("digest", "a package that devices accept", error) from error
            manifest = package.manifest
            why = HistoryRecord(time.time(), actor(), "package_added", manifest.name, manifest.title)
            ledger = self._services.ledger
            await ledger.do(ledger.store.add_history, why)
            self._all.append(package)
        log.info("package_added", package=manifest.name, version=manifest.version, digest=manifest.digest)
        for client in self._services.fleet.attendance.present():
            self._tell(client, package)
        return package

    def client_attached(self, client: str) -> None:
        """A device has come: tell it which packages there are for it."""
        for package in self.current().values():
            self._tell(client, package)

    def _tell(self, client: str, package: Package) -> None:
        session = self._services.fleet.sessions.of(client)
        if session is not None and package.manifest.name in session.packages:
            self._services.fleet.streams.push(client, package.offer)

    def _keep(self, upload: Path, digest: bytes, number: int) -> Package:
        with disk_errors("read an uploaded package"):
            if not upload.is_file():
                raise PackageRefused("upload", f"expected an upload with the digest {digest.hex()}: send it again")
            data = upload.read_bytes()
        manifest, wheels = unpack(data)
        check_signers(manifest, {manifest.signer, *(wheel.signer for wheel in manifest.wheels)})
        check_wheels(manifest, wheels)
        path = self._folder / f"{number:06}.{digest.hex()}{_ENDING}"
        with disk_errors(f"keep the package {manifest.name}"):
            make_folders(self._folder, durable=True)
            fsync_path(upload)
            upload.replace(path)
            fsync_path(self._folder)
        if self._services.files is not None:
            self._services.files.put_files([path])
        return self._package(number, data)

    def _package(self, number: int, data: bytes) -> Package:
        chunk_bytes = self._services.config.limits.chunk_bytes
        return Package(number, unpack(data)[0], plain_broadcast(RESOURCE_KIND_PACKAGE, memoryview(data), chunk_bytes))

    def _read_all(self) -> list[Package]:
        files = self._services.files
        for name in () if files is None else files.names(FOLDER):
            path = self._folder.parent / name
            if files is not None and not path.exists() and (stored := files.find(name)) is not None:
                make_folders(path.parent, durable=True)
                files.fetch(stored, path)
        found = []
        for path in sorted(self._folder.glob(f"*{_ENDING}")):
            try:
                found.append(self._package(int(path.name.partition(".")[0]), path.read_bytes()))
            except (PackageRefused, ValueError, OSError, StoreError) as error:
                log.error("package_not_readable", file=path.name, error=str(error))
        return found
