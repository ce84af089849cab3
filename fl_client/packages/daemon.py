"""The packages of a running daemon: which ones are fetched, allowed, installed and started, and when that changes.

The coordinator says which package of a name it has. The site's policy and the owner decide, and decide again when the
policy file or an approval changes. Nothing else of what the coordinator sends is ever loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import structlog
import torch

from fl_client.audit.log import DeviceAudit
from fl_client.connection.bundles.download import Download
from fl_client.connection.bundles.expected import ExpectedBundle
from fl_client.connection.link import Backoff, Link
from fl_client.connection.messages import log_text
from fl_client.errors import ClientError, PolicyChanged, StateError
from fl_client.packages.held import HeldPackages
from fl_client.packages.trainer import Installed, PackageTrainer
from fl_client.policy.site import SitePolicy
from fl_client.settings.config import ClientConfig
from fl_client.training.trainer import Trainer
from fl_common.packages import Manifest, PackageRefused
from protos.codec import digest_bytes, digest_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2

log = structlog.get_logger()

CHECK_S, AGAIN_S, BEGIN_S = 5.0, 300.0, 60.0
"""Seconds between two looks at the policy and the approvals; until a package that failed is tried again; and for which
a start of the daemon waits for packages."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """A package's file, as `Download` needs it."""

    resource: tensor_pb2.Resource
    run_id: str = ""
    header_bytes: int = 64 << 10

    @property
    def digest(self) -> tensor_pb2.Digest:
        return self.resource.digest

    @property
    def size_bytes(self) -> int:
        return self.resource.size_bytes

    def check(self, manifest: tensor_pb2.Manifest) -> None:
        """Its header tells nothing beyond its size, which is known."""
        del manifest


class Packages:
    """The packages of one daemon. Lives on the event loop; files and processes in threads."""

    def __init__(  # noqa: PLR0913, PLR0917 - parts of the daemon
        self,
        config: ClientConfig,
        trainers: list[Trainer],
        policy: SitePolicy,
        link: Link,
        audit: DeviceAudit,
        device: Callable[[], torch.device],
    ) -> None:
        """trainers: of the daemon, to which those of packages are added and from which they are removed."""
        self._config, self._trainers, self._policy = config, trainers, policy
        self._link, self._audit, self._device = link, audit, device
        self._held = HeldPackages(config.state_dir)
        self._numbers = {served.package: number for number, served in enumerate(config.served) if served.package}
        self._wanted: dict[str, pb.PackageOffer] = {}
        """What the coordinator has, by the name of the package."""
        self._running: dict[str, PackageTrainer] = {}
        self._told: dict[str, str] = {}
        """Why a package does not run, as it was logged last, by name."""
        self._known: dict[str, Manifest] = {}
        """Manifests that were read, by digest."""
        self._failed: dict[tuple[str, str], float] = {}
        """When a package may be tried again after an error, by name and digest."""
        self._changed, self._work, self._begun = asyncio.Event(), asyncio.Event(), asyncio.Event()
        if not self._numbers:
            self._begun.set()

    @property
    def names(self) -> list[str]:
        """The names of the packages that the settings name."""
        return list(self._numbers)

    def offers(self) -> list[pb.TaskOffer]:
        """The tasks of the packages that run, for a registration."""
        return [trainer.local.offer() for trainer in self._running.values()]

    def offered(self, offer: pb.PackageOffer) -> None:
        """The coordinator says which package it has. One that no task of the settings names is ignored."""
        if offer.name in self._numbers:
            self._wanted[offer.name] = offer
            self._work.set()

    async def until_changed(self) -> None:
        """Wait until other packages run. Raises PolicyChanged: the registration names them."""
        await self._changed.wait()
        self._changed.clear()
        raise PolicyChanged("other packages run on this device")

    async def begin(self, stop: asyncio.Event) -> None:
        """Wait until those that ran last run again, before this device is sent work for them; but not for long."""
        if self._begun.is_set():
            return
        waits = [asyncio.ensure_future(event.wait()) for event in (self._begun, stop)]
        await asyncio.wait(waits, timeout=BEGIN_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._changed.clear()

    async def run(self) -> None:
        """Fetch, install, start and end packages until cancelled."""
        try:
            while self._numbers:
                for name in self.names:
                    await self._look_at(name)
                self._begun.set()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._work.wait(), CHECK_S)
                self._work.clear()
        finally:
            for trainer in self._running.values():
                trainer.close()

    async def _look_at(self, name: str) -> None:
        """Let the package that should run run, and no other of its name."""
        running, digest = self._running.get(name), self._digest(name)
        loop = asyncio.get_running_loop()
        if not digest or loop.time() < self._failed.get((name, digest), 0.0):
            return
        try:
            manifest = await self._manifest(name, digest)
            if running is not None and running.package.digest == manifest.digest:
                await asyncio.to_thread(self._held.allow, manifest, self._policy.policy)
                return
            folder = await asyncio.to_thread(self._held.install, manifest, self._policy.policy)
            package = Installed(manifest.digest, manifest.title, folder, self._numbers[name])
            trainer = await asyncio.to_thread(PackageTrainer, self._config, package, self._device())
            await asyncio.to_thread(self._held.set_current, manifest)
        except PackageRefused as error:
            self._stop(name)
            self._tell(name, error.rule, str(error))
        except (StateError, OSError, ClientError) as error:
            self._failed[name, digest] = loop.time() + AGAIN_S
            self._stop(name)
            self._tell(name, "start", str(error))
        else:
            self._stop(name)
            self._running[name] = trainer
            self._trainers.append(trainer)
            self._told.pop(name, None)
            self._changed.set()
            self._audit.note("package_started", name, detail=manifest.title)
            log.info("package_started", package=name, version=manifest.version, digest=manifest.digest)

    def _digest(self, name: str) -> str:
        """Digest of the package that the coordinator has, else of the one that ran last; empty if there is none."""
        offer = self._wanted.get(name)
        return self._held.current(name) if offer is None else offer.digest

    async def _manifest(self, name: str, digest: str) -> Manifest:
        """The manifest of a package, fetched if it is not here. Raises PackageRefused, ClientError, OSError."""
        if (found := self._known.get(digest)) is None:
            found = await asyncio.to_thread(self._held.find, digest)
        if found is None:
            if (offer := self._wanted.get(name)) is None:
                raise PackageRefused("digest", f"expected the file of {digest} here, got none or other bytes")
            found = await asyncio.to_thread(self._held.keep, await self._fetched(offer))
        if (found.name, found.digest) != (name, digest):
            raise PackageRefused("digest", f"expected {name} with {digest}, as the coordinator said", found)
        self._known = {known: it for known, it in self._known.items() if it.name != name} | {digest: found}
        return found

    async def _fetched(self, offer: pb.PackageOffer) -> bytes:
        most = self._config.packages.file_mib << 20
        if not 0 < offer.resource.size_bytes <= most:
            raise PackageRefused("size", f"expected at most {most} bytes, got {offer.resource.size_bytes}")
        data = memoryview(bytearray(offer.resource.size_bytes))
        expected = cast(ExpectedBundle, _Expected(offer.resource))
        on_bytes: Any = lambda count: None  # noqa: E731 - nothing counts them
        download = Download(expected, data, Backoff(self._link.delays), on_bytes)
        await self._link.call_with_retry(download.resume, download.backoff)
        if await asyncio.to_thread(digest_of, data) != digest_bytes(offer.resource.digest):
            raise PackageRefused("digest", f"expected the file of {offer.digest}, got other bytes")
        return bytes(data)

    def _stop(self, name: str) -> None:
        if (trainer := self._running.pop(name, None)) is not None:
            self._trainers.remove(trainer)
            trainer.close()
            self._changed.set()
            log.info("package_stopped", package=name, digest=trainer.package.digest)

    def _tell(self, name: str, rule: str, why: str) -> None:
        if self._told.get(name) != why:
            self._told[name] = why
            self._audit.note("package_refused", name, rule, why)
            log.warning("package_refused", package=name, rule=rule, reason=log_text(why))
