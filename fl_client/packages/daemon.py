"""The packages of a running daemon: which ones are fetched, allowed, installed and started, and when that changes.

The coordinator says which package of a name this device should use. The site's policy and the owner decide, and decide
again when the policy file or an approval changes. Nothing else of what the coordinator sends is ever loaded. A package
that is refused or does not start leaves the one that runs where it is, and one that works is not replaced before its
work is done. The next registration names what runs and what is refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog
import torch

from fl_client.audit.log import DeviceAudit
from fl_client.connection.bundles.download import Download, ExpectedBytes
from fl_client.connection.link import Backoff, Link
from fl_client.connection.messages import log_text
from fl_client.errors import ClientError, PolicyChanged, StateError
from fl_client.packages.child import Installed
from fl_client.packages.held import HeldPackages
from fl_client.packages.trainer import PackageTrainer
from fl_client.policy.site import SitePolicy
from fl_client.settings.config import ClientConfig
from fl_client.training.trainer import Trainer
from fl_common.packages import Manifest, PackageRefused
from protos.codec import digest_bytes, digest_of
from protos.differences import DifferenceError
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()

CHECK_S, AGAIN_S, BEGIN_S = 5.0, 300.0, 60.0
"""Seconds between two looks at the policy and the approvals; until a package that failed is tried again; and for which
a start of the daemon waits for packages."""


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
        self.names = list(self._numbers)
        """The names of the packages that the settings name."""
        self._wanted: dict[str, pb.PackageOffer] = {}
        """What this device should use, by the name of the package."""
        self._running: dict[str, PackageTrainer] = {}
        self._refused: dict[str, pb.PackageRefusal] = {}
        """Why a package does not run, by name."""
        self._differs = False
        """Whether other packages are refused than the coordinator knows."""
        self._ready: dict[str, PackageTrainer] = {}
        """Processes of packages that take the place of the one that works, by name."""
        self._at_work = Counter[Trainer | None]()
        """How much work uses a trainer now."""
        self._known: dict[str, Manifest] = {}
        """Manifests that were read, by digest."""
        self._failed: dict[tuple[str, str], float] = {}
        """When a package may be tried again after an error, by name and digest."""
        self._changed, self._work, self._begun = asyncio.Event(), asyncio.Event(), asyncio.Event()
        if not self._numbers:
            self._begun.set()

    def offers(self) -> list[pb.TaskOffer]:
        """The tasks of the packages that run, for a registration."""
        return [trainer.local.offer() for trainer in self._running.values()]

    def refusals(self) -> list[pb.PackageRefusal]:
        """The packages that do not run although the coordinator offers them, for a registration."""
        return list(self._refused.values())

    @contextmanager
    def using(self, trainer: Trainer) -> Iterator[None]:
        """Work that needs a trainer: its package is not replaced meanwhile."""
        self._at_work[trainer] += 1
        try:
            yield
        finally:
            self._at_work[trainer] -= 1
            if not self._at_work[trainer]:
                del self._at_work[trainer]
            if isinstance(trainer, PackageTrainer):
                self._work.set()

    def offered(self, offer: pb.PackageOffer) -> None:
        """The coordinator says which package to use. One that no task of the settings names is ignored."""
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
                if self._differs:
                    self._differs = False
                    self._changed.set()
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_S):
                        await self._work.wait()
                self._work.clear()
        finally:
            for trainer in (*self._running.values(), *self._ready.values()):
                trainer.close()

    async def _look_at(self, name: str) -> None:
        """Let the package that should run run, and no other of its name, as far as it is allowed."""
        running, digest = self._running.get(name), self._digest(name)
        loop = asyncio.get_running_loop()
        self._drop_ready(name, digest)
        if loop.time() < self._failed.get((name, digest), 0.0):
            await self._end_unless_allowed(name)
            return
        if not digest:
            await self._use_none(name)
            return
        try:
            manifest = await self._manifest(name, digest)
            if running is not None and running.package.digest == manifest.digest:
                await asyncio.to_thread(self._held.allow, manifest, self._policy.policy)
                self._told(name, None)
                return
            folder = await asyncio.to_thread(self._held.install, manifest, self._policy.policy)
            trainer = await self._started(name, manifest, folder)
        except PackageRefused as error:
            self._drop_ready(name)
            await self._end_unless_allowed(name, digest)
            self._told(name, pb.PackageRefusal(name=name, digest=digest, rule=error.rule, detail=str(error)))
        except (StateError, OSError, ClientError) as error:
            self._failed[name, digest] = loop.time() + AGAIN_S
            self._drop_ready(name)
            await self._end_unless_allowed(name, digest)
            self._told(name, pb.PackageRefusal(name=name, digest=digest, rule="start", detail=str(error)))
        else:
            if trainer is None or self._at_work[running]:
                await self._end_unless_allowed(name)  # the next look comes when its work is done
                return
            self._stop(name)
            self._running[name] = self._ready.pop(name)
            self._trainers.append(trainer)
            self._told(name, None)
            self._changed.set()
            self._audit.note("package_started", name, detail=manifest.title)
            log.info("package_started", package=name, version=manifest.version, digest=manifest.digest)

    async def _started(self, name: str, manifest: Manifest, folder: Path) -> PackageTrainer | None:
        """The process of a package that may run, once the one before it is idle; None as long as that works.

        Raises StateError, OSError.
        """
        ready = self._ready.get(name)
        if ready is None and not self._at_work[self._running.get(name)]:
            package = Installed(manifest.digest, manifest.title, folder, self._numbers[name])
            ready = await asyncio.to_thread(PackageTrainer, self._config, package, self._device())
            self._ready[name] = ready
            await asyncio.to_thread(self._held.set_current, manifest)
        return ready

    def _drop_ready(self, name: str, wanted: str = "") -> None:
        """End the process that waits to take the place of the one that works, unless it is of the wanted package."""
        if name in self._ready and self._ready[name].package.digest != wanted:
            self._ready.pop(name).close()

    async def _use_none(self, name: str) -> None:
        """The coordinator has taken back the only package of a name, or has none."""
        if name not in self._wanted or self._at_work[self._running.get(name)]:
            await self._end_unless_allowed(name)
            return
        self._stop(name)
        self._told(name, None)
        await asyncio.to_thread(self._held.set_none, name)

    async def _end_unless_allowed(self, name: str, refused: str = "") -> None:
        """End the package that runs if it may not run any more. refused: the digest of one that may not."""
        if (running := self._running.get(name)) is None:
            return
        try:
            manifest = self._known.get(running.package.digest)
            if manifest is not None and manifest.digest != refused:
                await asyncio.to_thread(self._held.allow, manifest, self._policy.policy)
                return
        except (PackageRefused, OSError) as error:
            log.info("package_not_allowed", package=name, reason=log_text(str(error)))
        self._stop(name)

    def _digest(self, name: str) -> str:
        """Digest of the package that this device should use, else of the one that ran last; empty if there is none."""
        offer = self._wanted.get(name)
        return self._held.current(name) if offer is None else offer.digest

    async def _manifest(self, name: str, digest: str) -> Manifest:
        """The manifest of a package, fetched if it is not here. Raises PackageRefused, ClientError, OSError."""
        if (manifest := self._known.get(digest)) is None:
            manifest = await asyncio.to_thread(self._held.find, digest)
        if manifest is None:
            if (offer := self._wanted.get(name)) is None:
                raise PackageRefused("digest", f"expected the file of {digest} here, got none or other bytes")
            manifest = await asyncio.to_thread(self._held.keep, await self._fetched(offer))
        if (manifest.name, manifest.digest) != (name, digest):
            raise PackageRefused("digest", f"expected {name} with {digest}, as the coordinator said", manifest)
        runs = self._running[name].package.digest if name in self._running else ""
        self._known = {it.digest: it for it in self._known.values() if it.name != name or it.digest == runs}
        self._known[digest] = manifest
        return manifest

    async def _fetched(self, offer: pb.PackageOffer) -> bytes:
        most = self._config.packages.file_mib << 20
        if not 0 < offer.resource.size_bytes <= most:
            raise PackageRefused("size", f"expected at most {most} bytes, got {offer.resource.size_bytes}")
        data = memoryview(bytearray(offer.resource.size_bytes))
        expected = ExpectedBytes(offer.resource.digest, offer.resource.size_bytes)
        download = Download(expected, data, Backoff(self._link.delays), lambda _: None)  # nothing counts these bytes
        try:
            await self._link.call_with_retry(download.resume, download.backoff)
        except DifferenceError as error:
            raise PackageRefused("digest", str(error)) from error
        if await asyncio.to_thread(digest_of, data) != digest_bytes(offer.resource.digest):
            raise PackageRefused("digest", f"expected the file of {offer.digest}, got other bytes")
        return bytes(data)

    def _stop(self, name: str) -> None:
        if (trainer := self._running.pop(name, None)) is not None:
            self._trainers.remove(trainer)
            trainer.close()
            self._changed.set()
            log.info("package_stopped", package=name, digest=trainer.package.digest)

    def _told(self, name: str, refusal: pb.PackageRefusal | None) -> None:
        """Keep why a package does not run, for the log, the owner and the coordinator. None: nothing is refused."""
        if self._refused.get(name) == refusal:
            return
        self._differs = True
        if refusal is None:
            del self._refused[name]
            return
        self._refused[name] = refusal
        self._audit.note("package_refused", name, refusal.rule, refusal.detail)
        log.warning("package_refused", package=name, rule=refusal.rule, reason=log_text(refusal.detail))
