"""Who leads: the state of a coordinator opened, its lease kept, and the standby that waits for it.

With a ledger in PostgreSQL one coordinator holds the lease: it renews it, and ends as soon as another one leads. With
an object store too, another coordinator may wait. It follows the ledger, keeps copies of the newest checkpoints, which
it would have to fetch first, and takes the lease over. Its ports for clients and operators are closed, so that whoever
knows several addresses goes on to the leader's at once. Health and metrics answer.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import structlog

from fl_server.audit.log import keep_head
from fl_server.metrics import Metrics
from fl_server.settings.config import ServerConfig
from fl_server.store.checkpoint_files import round_of
from fl_server.store.database.lease import LeaseTerms
from fl_server.store.database.store import Leadership, LeaseKeeper, LeaseWatch, Store, StoredFile, open_ledger
from fl_server.store.errors import LedgerHeld, StoreError, StoreTakenOver, StoreUnavailable
from fl_server.store.ledger import Ledger
from fl_server.store.objects.bucket import Bucket, ObjectReader, check_access
from fl_server.store.state_directory import DirectoryLock, lock_directory

R = TypeVar("R")
log = structlog.get_logger()
RENEW_EVERY_S = 1.0
CHECKPOINTS = "checkpoints"
LOOK_EVERY_S = 0.5
COPY_EVERY_S = 2.0


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


class Copies:
    """A standby's copies of the newest checkpoint of each run that has not ended. `follow` is called by one thread."""

    def __init__(self, watch: LeaseWatch, bucket: Bucket, state_dir: Path) -> None:
        self._watch, self._bucket, self._state_dir = watch, bucket, state_dir
        self._lock, self._stopped = threading.Lock(), False
        self.behind_bytes = 0
        """Bytes of the newest checkpoints that are not copied yet."""

    def follow(self) -> None:
        """Copy what is missing, and remove what is not needed any more. Raises StoreUnavailable."""
        wanted = newest(self._watch.stored_files(CHECKPOINTS), set(self._watch.open_runs()))
        self._remove_others({(self._state_dir / file.name).parent for file in wanted})
        missing = [file for file in wanted if not self._has(file)]
        self.behind_bytes = sum(file.size_bytes for file in missing)
        reader = ObjectReader(self._bucket, self._watch.ledger_id())
        try:
            for file in missing:
                if self._stopped:
                    return
                self._fetch(reader, file)
        finally:
            reader.close()

    def _fetch(self, reader: ObjectReader, file: StoredFile) -> None:
        try:
            reader.fetch(file, self._state_dir / file.name)
        except StoreError as error:  # the leader may have removed it meanwhile
            log.info("not_copied", file=file.name, error=str(error))
        else:
            self.behind_bytes -= file.size_bytes

    def stop(self) -> None:
        """Begin no other file, and remove none: the folder belongs to a leader from now on."""
        with self._lock:
            self._stopped = True

    def close(self) -> None:
        """Close the connection."""
        self._watch.close()

    def _has(self, file: StoredFile) -> bool:
        path = self._state_dir / file.name
        return path.exists() and path.stat().st_size == file.size_bytes

    def _remove_others(self, wanted: set[Path]) -> None:
        with self._lock:
            if not self._stopped:
                for folder in self._state_dir.glob(f"{CHECKPOINTS}/run-*/round-*"):
                    if folder not in wanted:
                        shutil.rmtree(folder, ignore_errors=True)


def newest(files: list[StoredFile], open_runs: set[str]) -> list[StoredFile]:
    """The files of the newest checkpoint of each of these runs."""
    rounds: dict[str, dict[str, list[StoredFile]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        _, run, *rest = Path(file.name).parts
        if run.removeprefix("run-") in open_runs and len(rest) == 2:
            rounds[run][rest[0]].append(file)
    chosen = []
    for folders in rounds.values():
        numbers = {round_of(folder): folder for folder in folders}
        chosen += folders[numbers[max(numbers)]]
    return chosen


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
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await leaving.wait()
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
