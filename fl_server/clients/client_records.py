"""The records of all clients, in memory and in the ledger, for whom they work, what became of it, who is told of it.

A restarted coordinator knows them again. Only the ledger counts work (`fl_server.store.client_work`): after an event in
it, the counts of the clients concerned are read again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from fl_common.units import counted
from fl_server.clients.sessions import Asked
from fl_server.errors import Forbidden, NoSuchClient
from fl_server.identity import Identity
from fl_server.store.client_work import ClientWork
from fl_server.store.errors import StoreError
from fl_server.store.ledger import MOST_CLIENTS, Ledger, write_when_possible
from fl_server.store.records import ClientRecord, HistoryRecord, only_banned
from protos.fl.v1.training_pb2 import Outcome

log = structlog.get_logger()
PAUSE_A_CLIENT_S = 20e-6
"""Seconds for each known client between two reports: when ten thousand clients come at once, all clients are checked
a few times, not ten thousand times."""
LONGEST_PAUSE_S = 1.0
"""Longest pause after a report that took long: the machine may have stood still meanwhile."""
_NOTHING = ClientWork()


class FleetListener:
    """Is informed when clients come and go. This one does nothing about it."""

    async def settled(self, asked: Asked, client_id: str) -> tuple[list[Outcome], list[str]]:  # noqa: ARG002 - of none
        """The outcomes of updates that a client asks about, and which of its runs have ended. Raises StoreError."""
        return [], []

    def client_attached(self, client_id: str) -> None:
        """The client can be reached; push its outstanding work."""

    def client_available(self, client_id: str) -> None:
        """The client may train again; offer it again the work that it gave up and that is still wanted."""

    def client_released(self, client_id: str) -> None:
        """An operator lets the client take part again."""

    def client_gone(self, client_id: str, reason: str) -> None:
        """The client is lost, banned or forgotten; do not wait for it."""

    def fleet_changed(self) -> None:
        """Other clients may be eligible now."""


class FleetChanges:
    """Collects changes of eligibility, for each report makes every run check all clients. Lives on the event loop."""

    def __init__(self, records: ClientRecords) -> None:
        self.listener = FleetListener()
        self.version = 0
        """Increases whenever some client's eligibility may have changed."""
        self._records = records
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = 0.0

    @property
    def reported(self) -> bool:
        """Whether the latest change has been reported."""
        return self._timer is None

    @property
    def shortest_pause_s(self) -> float:
        """Least time between two checks of all clients."""
        return PAUSE_A_CLIENT_S * len(self._records)

    def changed(self, *, eligibility: bool = True) -> None:
        """eligibility: other clients may be eligible now, for which every run checks all clients."""
        self.version += eligibility
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._report)

    def gone(self, client_id: str, reason: str) -> None:
        """Report that a client is lost, banned or forgotten."""
        self.listener.client_gone(client_id, reason)
        self.changed()

    def _report(self) -> None:
        """Report all changes since the last time, and wait longer before the next report if this one took long."""
        loop = asyncio.get_running_loop()
        self._timer, began = None, loop.time()
        self.listener.fleet_changed()
        self._pause_s = max(self.shortest_pause_s, min(20 * (loop.time() - began), LONGEST_PAUSE_S))


class ClientRecords:
    """Reads and writes client records. Lives on the event loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.changes = FleetChanges(self)
        self._records: dict[str, ClientRecord] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._watcher: Callable[[str], None] = lambda _: None

    def watch(self, watcher: Callable[[str], None]) -> None:
        """Call `watcher` with the id of each client whose record has changed."""
        self._watcher = watcher

    async def load(self) -> None:
        """Read all records at a start."""
        for record in await self.all():
            self._set(record)

    def __len__(self) -> int:
        return len(self._records)

    def in_memory(self) -> Mapping[str, ClientRecord]:
        """The records by client id; a live view."""
        return self._records

    async def all(self) -> list[ClientRecord]:
        """All records of the ledger in the order of id bytes, with the counters that only the ledger updates."""
        return await self._ledger.do(self._ledger.store.clients)

    def find(self, client_id: str) -> ClientRecord | None:
        """A client's record; None if it never registered, or was forgotten."""
        return self._records.get(client_id)

    async def enrolled_labels(self, serial: str) -> Mapping[str, str] | None:
        """Labels of the enrollment that a certificate comes from; None for one of another source, and for none."""
        if not serial:
            return None
        certificates = await self._ledger.do(self._ledger.store.certificates_with, "serial", serial)
        return certificates[0].labels if certificates else None

    def get(self, client_id: str) -> ClientRecord:
        """A client's record. Raises NoSuchClient."""
        record = self.find(client_id)
        if record is None:
            raise NoSuchClient(client_id)
        return record

    def banned(self, client_id: str) -> bool:
        """Whether nothing of the client counts: it is banned, or was forgotten."""
        record = self.find(client_id)
        return record is None or record.banned

    def refuse_holder(self, who: Identity) -> None:
        """Raises Forbidden for the certificate of a banned client, before a request of it is received."""
        if who.role == "client":
            self.refuse_banned(who.name)

    def refuse_banned(self, client_id: str) -> None:
        """Raises Forbidden for a banned client."""
        known = self.find(client_id)
        if known is not None and known.banned:
            raise Forbidden(f"client:{client_id}", f"to be unbanned (banned: {known.note or 'no reason given'})")

    async def write(self, record: ClientRecord, why: HistoryRecord | None) -> None:
        """Write a record here and in the ledger. Raises StoreError, and then nothing is changed."""
        await self._put(record, why)
        self.changes.changed()

    async def write_note(self, client_id: str, text: str) -> None:
        """Store a note on a client for operators: its last failure. A note changes nobody's eligibility."""
        record = self.find(client_id)
        if record is not None and record.note != text:
            await self._put(replace(record, note=text), None)

    async def clear_notes(self, clients: Iterable[str]) -> None:
        """Remove the notes on failures of clients whose updates count now. A reason of an operator stays."""
        for client_id in clients:
            record = self.find(client_id)
            if record is not None and record.note and not (record.banned or record.draining):
                await self.write_note(client_id, "")

    def forget(self, client_id: str) -> None:
        """Drop a client's record from memory. A ban stays."""
        known = self._records.pop(client_id, None)
        if known is not None and known.banned:
            self._records[client_id] = only_banned(known)
        self._watcher(client_id)

    def write_history_later(self, why: HistoryRecord) -> None:
        """Write a history row that belongs to no change of a record, in the background."""
        self.in_background(partial(self._ledger.do, self._ledger.store.add_history, why))

    async def note_resets(self, client_id: str, resets: int) -> None:
        """Write that a device's privacy account began anew, once for each time that the device tells of.

        resets: how often it did, as the device says.
        """
        if not resets:
            return
        store, event = self._ledger.store, "privacy_account_reset"
        told = await self._ledger.do(store.history_details, client_id, event)
        if any(detail.startswith(f"{resets} ") for detail in told):
            return
        why = (
            f"{counted(resets, 'time')} so far: what the device states of its privacy does not count what "
            "its data spent before"
        )
        log.warning(event, client=client_id, resets=resets)
        self.write_history_later(HistoryRecord(time.time(), f"client:{client_id}", event, client_id, why))

    def in_background(self, write: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Write to the ledger in the background, as soon as it can be written."""
        task = asyncio.create_task(write_when_possible(_log_not_written, write))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _put(self, record: ClientRecord, why: HistoryRecord | None) -> None:
        before = self.find(record.client_id)
        self._set(record)
        try:
            await self._ledger.put_client(record, why)
        except StoreError:
            self._take_back(record, before)
            raise

    def _take_back(self, record: ClientRecord, before: ClientRecord | None) -> None:
        """A record that is not in the ledger is not kept in memory either: a restart would not know it."""
        if self._records.get(record.client_id) is record:
            del self._records[record.client_id]
            if before is not None:
                self._records[record.client_id] = before
            self._watcher(record.client_id)

    def _set(self, record: ClientRecord) -> None:
        self._records[record.client_id] = record
        self._watcher(record.client_id)


def _log_not_written(why: str) -> None:
    if why:
        log.warning("presence_not_written", error=why)


class Workers:
    """The run that each client works for now. Lives on the event loop."""

    def __init__(self, changes: FleetChanges) -> None:
        self._changes = changes
        self._run_of: dict[str, str] = {}
        self._workers: dict[str, set[str]] = {}
        """`_run_of` by run."""

    def change(self, run_id: str, begun: AbstractSet[str], done: AbstractSet[str]) -> None:
        """Some clients have begun to work for the run, and some are done. Takes no longer for a large cohort."""
        workers = self._workers.setdefault(run_id, set())
        for client_id in done & workers:
            del self._run_of[client_id]
        workers -= done
        for client_id in begun:
            self._workers.get(self._run_of.get(client_id, run_id), workers).discard(client_id)
            self._run_of[client_id] = run_id
        workers |= begun
        if not workers:
            del self._workers[run_id]
        if begun or done:
            self._changes.changed()

    def run_of(self, client_id: str) -> str:
        """The run that the client works for now; empty for none."""
        return self._run_of.get(client_id, "")

    def of_others(self, run_id: str) -> list[tuple[str, str]]:
        """The clients that work for other runs, each with its run."""
        if len(self._run_of) == len(self._workers.get(run_id, ())):
            return []
        return [(client_id, of) for client_id, of in self._run_of.items() if of != run_id]


class WorkCounts:
    """The counts by client. Lives on the event loop; a scraper's thread may read `of`."""

    def __init__(self, ledger: Ledger, records: ClientRecords) -> None:
        self._ledger, self._records = ledger, records
        self._by_client: dict[str, ClientWork] = {}

    def restore(self, records: Iterable[ClientRecord]) -> None:
        """Take over what the ledger has at a start."""
        self._by_client = {record.client_id: record.work for record in records}

    def of(self, client_id: str) -> ClientWork:
        """The counts of a client; all 0 for one without any work."""
        return self._by_client.get(client_id, _NOTHING)

    def changed(self, client_ids: Collection[str]) -> None:
        """Read the counts of these clients again, in the background. The ledger's calls run in order."""
        if client_ids:
            self._records.in_background(partial(self._read, list(client_ids)))

    def count_lost(self, client_id: str) -> None:
        """Count that a client was lost, banned or forgotten while it worked.

        After a kill before the write the client is waited for again, and counted when it is lost again.
        """
        self._records.in_background(partial(self._ledger.do, self._ledger.store.count_lost, client_id))
        self.changed([client_id])

    def forget(self, client_id: str) -> None:
        """Drop the counts of a client that was forgotten."""
        self._by_client.pop(client_id, None)

    async def _read(self, client_ids: list[str]) -> None:
        for first in range(0, len(client_ids), MOST_CLIENTS):
            some = client_ids[first : first + MOST_CLIENTS]
            self._by_client.update(await self._ledger.do(self._ledger.store.work_of, some))
