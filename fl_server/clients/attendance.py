"""Who is connected: a client with an Attend stream is present, and one that lost it is suspect until its grace is over.

The presence of clients is also in the ledger, so that a restarted coordinator knows for which clients to wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import structlog

from fl_server.clients.client_records import ClientRecords
from fl_server.clients.roster import Presence, Roster
from fl_server.clients.sessions import Session, Sessions
from fl_server.errors import UnknownSessionError
from fl_server.store.records import ClientRecord, HistoryRecord

log = structlog.get_logger()


class Attendance:
    """The presence of all clients. Lives on the event loop."""

    def __init__(self, records: ClientRecords, sessions: Sessions, grace_s: float) -> None:
        """grace_s: a client is lost after being away for this long."""
        self._records, self._sessions, self._changes = records, sessions, records.changes
        self._grace_s = grace_s
        self._roster = Roster(grace_s)
        self._tick_timer: asyncio.TimerHandle | None = None

    def restore(self) -> None:
        """Wait for the clients that were present before a restart."""
        records = self._records.in_memory().values()
        expected = [record.client_id for record in records if record.present and not record.banned]
        self._roster.expect(expected, time.monotonic())
        self._tick_later()
        if expected:
            log.info("roster_awaited", clients=len(expected), grace_s=self._grace_s)

    def watch(self, watcher: Callable[[str], None]) -> None:
        """Call `watcher` with the id of each client that is one of `present` now, or is no more."""
        self._roster.watch(watcher)

    @property
    def settled(self) -> bool:
        """False after a start until every expected client is back or was waited for."""
        return self._roster.settled

    def present(self) -> tuple[str, ...]:
        """Clients that are attached, or may come back within the grace, in the order of id bytes."""
        return self._roster.present()

    def __contains__(self, client_id: object) -> bool:
        """Whether the client is one of `present`."""
        return client_id in self._roster

    def attached(self, client_id: str) -> bool:
        """Whether the client has an open stream."""
        session = self._sessions.of(client_id)
        return session is not None and session.stream is not None

    def process_of(self, client_id: str) -> str:
        """The process of the client's daemon that is attached; empty if none is."""
        session = self._sessions.of(client_id)
        return "" if session is None or session.stream is None else session.instance_id

    def state(self, client_id: str) -> str:
        """One of "present", "suspect" or "lost"."""
        presence = self._roster.state_of(client_id)
        return presence.value if presence is not None else "lost"

    def count(self, presence: Presence) -> int:
        """The number of clients in a state. Those that were not here since the coordinator's start have none."""
        return self._roster.count(presence)

    def last_seen(self, record: ClientRecord) -> float:
        """Unix time of a client's latest sign of life. Keepalives prove that a client with an open stream is there."""
        if self.attached(record.client_id):
            return time.time()
        return self._sessions.last_sign(record.client_id) or record.last_seen

    async def begun(self, client_id: str) -> None:
        """The client has attached. Raises StoreError."""
        before = (self._roster.settled, client_id in self._roster)
        self._roster.attached(client_id, time.monotonic())
        eligibility_changed = before != (self._roster.settled, True)
        log.debug("client_attached", client=client_id)
        await self._set_present(client_id, True)
        self._changes.attached(client_id)
        self._changes.changed(eligibility=eligibility_changed)

    def stream_lost(self, client_id: str) -> None:
        """The client's stream ended. It may come back within the grace."""
        self._sessions.sign_of_life(client_id)
        self._roster.stream_lost(client_id, time.monotonic())
        self._changes.changed(eligibility=False)
        self._tick_later()

    def close_unattended(self, session: Session) -> None:
        """Close the session of a client that registered and never attended: it has no stream that could be lost."""
        client_id = session.client_id
        if self._sessions.of(client_id) is session and session.stream is None and client_id not in self._roster:
            self._sessions.close(client_id, UnknownSessionError())

    def forget(self, client_id: str) -> None:
        """Wait for the client no longer."""
        self._roster.forget(client_id)

    def tick(self) -> None:
        """Give up the clients whose grace is over."""
        for client_id in self._roster.tick(time.monotonic()):
            log.info("client_lost", client=client_id, grace_s=self._grace_s)
            # The client registers again when it comes back. Otherwise sessions would pile up.
            self._sessions.close(client_id, UnknownSessionError())
            self._records.in_background(partial(self._write_absence, client_id))
            self._changes.gone(client_id, "lost")
        self._changes.changed()

    def _tick_later(self) -> None:
        """Set the timer for the first grace that ends: one timer, however many clients are suspect."""
        if self._tick_timer is not None or (left := self._roster.next_tick(time.monotonic())) is None:
            return
        # A little after the grace, so that the roster's clock agrees that it is over.
        pause = max(0.02, self._changes.shortest_pause_s)
        self._tick_timer = asyncio.get_running_loop().call_later(left + pause, self._timed_tick)

    def _timed_tick(self) -> None:
        self._tick_timer = None
        self.tick()
        self._tick_later()

    async def _write_absence(self, client_id: str) -> None:
        """Record that a client is lost, so that a restart does not wait for it; unless it has come back."""
        if self.state(client_id) == "lost":
            detail = f"not attached for {self._grace_s:g} s"
            why = HistoryRecord(time.time(), "coordinator", "client_lost", client_id, detail)
            await self._set_present(client_id, False, why)

    async def _set_present(self, client_id: str, present: bool, why: HistoryRecord | None = None) -> None:
        record = self._records.find(client_id)
        if record is not None and record.present != present:
            await self._records.write(replace(record, present=present, last_seen=self.last_seen(record)), why)
