"""A coordinator that waits: it follows the ledger, keeps copies of the newest checkpoints, and takes the lease over.

Its ports for clients and operators are closed, so that whoever knows several addresses goes on to the leader's at once.
Health and metrics answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import structlog

from fl_server.audit.writer import keep_head
from fl_server.leadership.copies import Copies
from fl_server.leadership.opening import Opened, ledger_url, open_state
from fl_server.metrics import Metrics
from fl_server.settings.config import ServerConfig
from fl_server.store.database.leadership import Leadership, LeaseWatch
from fl_server.store.errors import LedgerHeld, StoreError, StoreUnavailable
from fl_server.store.objects.bucket import Bucket, check_access
from fl_server.store.state_directory import DirectoryLock

R = TypeVar("R")

log = structlog.get_logger()

LOOK_EVERY_S = 0.5
COPY_EVERY_S = 2.0


class Standby:
    """Waits for the lease of one ledger. Lives on the event loop."""

    def __init__(self, config: ServerConfig, lock: DirectoryLock, metrics: Metrics) -> None:
        """lock: of the state directory. Raises StoreError if the object store cannot be used."""
        url, storage = ledger_url(config), config.storage
        if url is None or storage is None:
            raise RuntimeError("expected settings with a ledger in PostgreSQL and an object store")
        self._config, self._lock, self._metrics = config, lock, metrics
        self._watch = LeaseWatch(url, lock.home.id)
        self._bucket = Bucket(storage, config.objects)
        self._copies = Copies(LeaseWatch(url, lock.home.id), self._bucket, config.state_dir)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="standby")
        self._seen = time.monotonic()
        self._leader = ""
        metrics.lease_age.set_function(lambda: time.monotonic() - self._seen)
        metrics.standby_behind.set_function(lambda: float(self._copies.behind_bytes))

    async def lead(self, leaving: asyncio.Event) -> Opened | None:
        """Wait until this coordinator leads, and return what it has opened; None: `leaving` was set before."""
        copying = asyncio.create_task(self._copy())
        try:
            while not leaving.is_set():
                if (opened := await self._try()) is not None:
                    return opened
                with suppress(TimeoutError):
                    await asyncio.wait_for(leaving.wait(), LOOK_EVERY_S)
            with suppress(StoreError):
                await self._in_thread(self._watch.forget)
            return None
        finally:
            copying.cancel()
            self._close()

    async def _try(self) -> Opened | None:
        try:
            leadership = await self._in_thread(self._watch.look)
            self._seen = time.monotonic()
            leader = leadership.leader
            if self._watch.is_free(leadership):
                return await self._in_thread(lambda: self._open(leadership))
            if leader is not None and leader.holder != self._leader:
                self._leader = leader.holder
                await self._in_thread(lambda: check_access(self._bucket))
                log.info("standing_by", leader=leader.holder, epoch=leader.epoch)
            self._metrics.ledger_epoch.set(leader.epoch if leader is not None else 0)
            await self._in_thread(self._note)
        except LedgerHeld:
            pass  # another standby was faster
        except StoreUnavailable as error:
            log.warning("standby_cannot_read", error=str(error))
        return None

    def _open(self, leadership: Leadership) -> Opened:
        """Take the lease. Raises LedgerHeld if another standby was faster."""
        leader = leadership.leader
        is_gone = leader is not None and self._watch.gone(leader)
        opened = open_state(self._config, self._lock, leader.epoch if leader is not None and is_gone else 0)
        log.info("leading", epoch=opened.store.claim.epoch, before=leader.holder if leader else "", killed=is_gone)
        return opened

    def _note(self) -> None:
        self._watch.note(self._copies.behind_bytes)
        keep_head(self._config.state_dir, self._watch.audit_head())

    async def _copy(self) -> None:
        while True:
            await asyncio.sleep(COPY_EVERY_S if self._leader else LOOK_EVERY_S)
            if self._leader:
                with suppress(StoreError):  # `_try` has said so
                    await self._in_thread(self._copies.follow)

    async def _in_thread(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _close(self) -> None:
        """A copy under way ends by itself."""
        self._copies.stop()
        self._threads.submit(self._copies.close)
        self._threads.submit(self._watch.close)
        self._threads.shutdown(wait=False)
