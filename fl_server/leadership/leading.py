"""What a coordinator has alone: its state directory and the ledger with the right to write it, opened and kept.

The lease is renewed, and the coordinator ends as soon as another one leads.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from fl_server.metrics import Metrics
from fl_server.settings.config import ServerConfig
from fl_server.store.database.leadership import Leadership, LeaseKeeper
from fl_server.store.database.ownership import LeaseTerms
from fl_server.store.database.store import Store, open_ledger
from fl_server.store.errors import StoreError, StoreTakenOver
from fl_server.store.ledger import Ledger
from fl_server.store.state_directory import DirectoryLock, lock_directory

log = structlog.get_logger()
RENEW_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Opened:
    """A locked state directory and its ledger."""

    lock: DirectoryLock
    store: Store


def open_state(config: ServerConfig, lock: DirectoryLock | None = None, gone: int = 0) -> Opened:
    """Lock the state directory, unless that is done, and open the ledger, which belongs to it from now on.

    gone: the epoch of a leader that is known to have ended. Raises LedgerHeld while another coordinator leads.
    """
    locked = lock or lock_directory(config.state_dir)
    home = replace(locked.home, storage=config.storage or "")
    terms = LeaseTerms(config.lease_s, gone)
    try:
        store = open_ledger(ledger_url(config), config.state_dir, config.durability, home, terms)
    except BaseException:
        if lock is None:
            locked.release()
        raise
    locked.keep_ledger(store.coordinator_id)
    return Opened(locked, store)


def ledger_url(config: ServerConfig) -> str | None:
    """The URL of a ledger in PostgreSQL; None for SQLite."""
    return None if config.ledger is None else config.ledger.get_secret_value()


def may_stand_by(config: ServerConfig) -> bool:
    """Whether a second coordinator may wait: it can read all that the leader has written."""
    return config.ledger is not None and config.storage is not None


class Leading:
    """The lease of this coordinator. Lives on the event loop."""

    def __init__(self, url: str, ledger: Ledger, seconds: float, metrics: Metrics) -> None:
        """seconds: how long the lease lasts without a renewal."""
        self._ledger, self._metrics = ledger, metrics
        self._keeper = LeaseKeeper(url, ledger.store.claim.epoch, seconds)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lease")
        self._keeping: asyncio.Task[None] | None = None
        self.leadership = Leadership(None)
        """What the ledger said at the last renewal."""
        metrics.ledger_epoch.set(self._keeper.epoch)
        metrics.leading.set(1)
        metrics.lease_age.set_function(lambda: time.monotonic() - self._keeper.renewed)

    def start(self) -> None:
        """Renew the lease from now on."""
        self._keeping = asyncio.create_task(self._keep())

    @property
    def has_standby(self) -> bool:
        """Whether another coordinator waits for the lease."""
        return bool(self.leadership.standbys)

    async def _keep(self) -> None:
        failing = False
        while True:
            try:
                # After a stop of the process the first thing that is known is how long it took.
                await self._renew(max(0.0, self._left_s))
            except StoreTakenOver as error:
                self._lose(error)
                return
            except (StoreError, TimeoutError) as error:
                if not failing:
                    log.warning("lease_not_renewed", error=str(error) or "the database does not answer")
                failing = True
                if self._left_s <= 0 and self.has_standby:
                    why = f"the lease could not be renewed for {self._keeper.seconds:g} s, and a standby takes it"
                    self._lose(StoreTakenOver(f"{why}; this coordinator has changed nothing since"))
                    return
            else:
                failing = False
            await asyncio.sleep(RENEW_EVERY_S)

    async def _renew(self, within_s: float) -> None:
        """Raises TimeoutError if the database does not answer. Without a standby the lease may end meanwhile."""
        limit = within_s if self.has_standby else self._keeper.seconds
        async with asyncio.timeout(limit):
            loop = asyncio.get_running_loop()
            self.leadership = await loop.run_in_executor(self._thread, self._keeper.renew)
        self._metrics.standbys.set(len(self.leadership.standbys))

    @property
    def _left_s(self) -> float:
        return self._keeper.renewed + self._keeper.seconds - time.monotonic()

    def _lose(self, error: StoreTakenOver) -> None:
        log.error("leadership_lost", epoch=self._keeper.epoch, error=str(error))
        self._metrics.leading.set(0)
        self._ledger.take_away(error)

    async def close(self) -> None:
        """Renew no more. The ledger gives the lease back when it is closed."""
        if self._keeping is not None:
            self._keeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeping
        self._thread.submit(self._keeper.close)
        self._thread.shutdown(wait=False)
