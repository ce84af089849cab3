"""Who is connected, and the messages that are pushed to each client.

    PRESENT --stream lost--> SUSPECT --reattach_grace--> LOST
       ^------- attached -------'------- attached --------'

A suspect still counts as present, so that a short interruption changes no cohort. `Roster` has no clock: `now` is an
argument, in seconds of a monotonic clock. The presence of clients is also in the ledger, so that a restarted
coordinator knows for which clients to wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

import structlog

from fl_common.units import counted
from fl_server.clients.client_records import ClientRecords
from fl_server.clients.sessions import Session, Sessions, Stream, check_questions, shown_certificate
from fl_server.clients.transfer_limits import Excess, TransferLimits
from fl_server.errors import UnknownSessionError
from fl_server.rounds.sampling import by_id
from fl_server.store.records import ClientRecord, HistoryRecord
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()


class Presence(Enum):
    """The state of a client's connection."""

    PRESENT = "present"
    """It is attached."""
    SUSPECT = "suspect"
    """Its stream is gone, or it has not come back since a restart."""
    LOST = "lost"
    """It was away for longer than the grace."""


class Roster:
    """The presence of all registered clients."""

    def __init__(self, reattach_grace_s: float) -> None:
        """reattach_grace_s: a client is lost after being away for this long; 0: at the next tick."""
        if not reattach_grace_s >= 0:
            raise ValueError(f"expected a reattach_grace_s of 0 or more seconds, got {reattach_grace_s}")
        self._grace_s = reattach_grace_s
        self._presence: dict[str, Presence] = {}
        self._lost_at: dict[str, float] = {}
        """When each suspect will be lost."""
        self._expected: set[str] = set()
        """Suspects of `expect` that have not come back."""
        self._present: tuple[str, ...] | None = None
        """The cached result of `present`."""
        self._counts: Counter[Presence] = Counter()
        self._watcher: Callable[[str], None] = lambda _: None

    def watch(self, watcher: Callable[[str], None]) -> None:
        """Call `watcher` with the id of each client that is one of `present` now, or is no more."""
        self._watcher = watcher

    def count(self, presence: Presence) -> int:
        """The number of clients in a state."""
        return self._counts[presence]

    def attached(self, client: str, now: float) -> None:
        """The client has a stream. `now` is unused; every transition has it."""
        del now
        self._set(client, Presence.PRESENT)

    def stream_lost(self, client: str, now: float) -> None:
        """The client's stream ended. A client that is not PRESENT, such as a forgotten one, does not change."""
        if self._presence.get(client) is Presence.PRESENT:
            self._set(client, Presence.SUSPECT)
            self._lost_at[client] = now + self._grace_s

    def expect(self, clients: Iterable[str], now: float) -> None:
        """Clients that were present before a restart are SUSPECT from now. Known clients do not change."""
        for client in set(clients) - self._presence.keys():
            self._set(client, Presence.SUSPECT)
            self._lost_at[client] = now + self._grace_s
            self._expected.add(client)

    def forget(self, client: str) -> None:
        """Remove a client. An unknown one is no error."""
        self._clear(client)
        if (before := self._presence.pop(client, None)) is not None:
            self._counts[before] -= 1
        self._present = None
        self._watcher(client)

    def tick(self, now: float) -> tuple[str, ...]:
        """Give up the suspects whose grace is over. Returns these newly LOST clients in the order of id bytes."""
        lost = by_id(client for client, lost_at in self._lost_at.items() if lost_at <= now)
        for client in lost:
            self._set(client, Presence.LOST)
        return lost

    def next_tick(self, now: float) -> float | None:
        """Seconds until `tick` may find a lost client, 0 if it would now; None without suspects."""
        return max(0.0, min(self._lost_at.values()) - now) if self._lost_at else None

    def present(self) -> tuple[str, ...]:
        """Clients that are PRESENT or SUSPECT, in the order of id bytes."""
        if self._present is None:
            self._present = by_id(client for client, state in self._presence.items() if state is not Presence.LOST)
        return self._present

    def __contains__(self, client: object) -> bool:
        """Whether the client is one of `present`."""
        return isinstance(client, str) and self._presence.get(client, Presence.LOST) is not Presence.LOST

    def state_of(self, client: str) -> Presence | None:
        """A client's presence; None if it never registered, or was forgotten."""
        return self._presence.get(client)

    @property
    def settled(self) -> bool:
        """Whether every expected client is back or was given up."""
        return not self._expected

    def _set(self, client: str, presence: Presence) -> None:
        self._clear(client)
        # A change between PRESENT and SUSPECT keeps the cached result: a fleet that comes back is not sorted again.
        before = self._presence.get(client)
        self._presence[client] = presence
        self._counts[presence] += 1
        if before is not None:
            self._counts[before] -= 1
        if (before in (None, Presence.LOST)) != (presence is Presence.LOST):
            self._present = None
            self._watcher(client)

    def _clear(self, client: str) -> None:
        self._lost_at.pop(client, None)
        self._expected.discard(client)


class Attendance:
    """The presence of all clients. Lives on the event loop."""

    def __init__(self, records: ClientRecords, sessions: Sessions, grace_s: float) -> None:
        """grace_s: a client is lost after being away for this long."""
        self._records, self.sessions, self.changes = records, sessions, records.changes
        self._grace_s = grace_s
        self.roster = Roster(grace_s)
        """Who is present, suspect or lost."""
        self._tick_timer: asyncio.TimerHandle | None = None

    def restore(self) -> None:
        """Wait for the clients that were present before a restart."""
        records = self._records.in_memory().values()
        expected = [record.client_id for record in records if record.present and not record.banned]
        self.roster.expect(expected, time.monotonic())
        self._tick_later()
        if expected:
            log.info("roster_awaited", clients=len(expected), grace_s=self._grace_s)

    def attached(self, client_id: str) -> bool:
        """Whether the client has an open stream."""
        session = self.sessions.of(client_id)
        return session is not None and session.stream is not None

    def process_of(self, client_id: str) -> str:
        """The process of the client's daemon that is attached; empty if none is."""
        session = self.sessions.of(client_id)
        return "" if session is None or session.stream is None else session.instance_id

    def state(self, client_id: str) -> str:
        """One of "present", "suspect" or "lost"."""
        presence = self.roster.state_of(client_id)
        return presence.value if presence is not None else "lost"

    def last_seen(self, record: ClientRecord) -> float:
        """Unix time of a client's latest sign of life. Keepalives prove that a client with an open stream is there."""
        if self.attached(record.client_id):
            return time.time()
        return self.sessions.last_sign(record.client_id) or record.last_seen

    async def begun(self, client_id: str, certificate: Mapping[str, Any] | None = None) -> None:
        """The client has attached. certificate: as `ClientRecord` has it. Raises StoreError."""
        before = (self.roster.settled, client_id in self.roster)
        self.roster.attached(client_id, time.monotonic())
        eligibility_changed = before != (self.roster.settled, True)
        log.debug("client_attached", client=client_id)
        await self._set_present(client_id, True, certificate=certificate)
        self.changes.listener.client_attached(client_id)
        self.changes.changed(eligibility=eligibility_changed)

    def stream_lost(self, client_id: str) -> None:
        """The client's stream ended. It may come back within the grace."""
        self.sessions.sign_of_life(client_id)
        self.roster.stream_lost(client_id, time.monotonic())
        self.changes.changed(eligibility=False)
        self._tick_later()

    def close_unattended(self, session: Session) -> None:
        """Close the session of a client that registered and never attended: it has no stream that could be lost."""
        client_id = session.client_id
        if self.sessions.of(client_id) is session and session.stream is None and client_id not in self.roster:
            self.sessions.close(client_id, UnknownSessionError())

    def tick(self) -> None:
        """Give up the clients whose grace is over."""
        for client_id in self.roster.tick(time.monotonic()):
            log.info("client_lost", client=client_id, grace_s=self._grace_s)
            # The client registers again when it comes back. Otherwise sessions would pile up.
            self.sessions.close(client_id, UnknownSessionError())
            self._records.in_background(partial(self._write_absence, client_id))
            self.changes.gone(client_id, "lost")
        self.changes.changed()

    def _tick_later(self) -> None:
        """Set the timer for the first grace that ends: one timer, however many clients are suspect."""
        if self._tick_timer is not None or (left := self.roster.next_tick(time.monotonic())) is None:
            return
        # A little after the grace, so that the roster's clock agrees that it is over.
        pause = max(0.02, self.changes.shortest_pause_s)
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

    async def _set_present(
        self,
        client_id: str,
        present: bool,
        why: HistoryRecord | None = None,
        certificate: Mapping[str, Any] | None = None,
    ) -> None:
        """certificate: the one that it shows now; None: none, or the same as before."""
        record = self._records.find(client_id)
        if record is None or (record.present == present and certificate in (None, record.certificate)):
            return
        shown = record.certificate if certificate is None else certificate
        changed = replace(record, present=present, last_seen=self.last_seen(record), certificate=shown)
        await self._records.write(changed, why)


class Streams:
    """The Attend streams of all clients. Lives on the event loop."""

    def __init__(self, sessions: Sessions, attendance: Attendance, limits: TransferLimits, most_waiting: int) -> None:
        """most_waiting: a client that reads nothing while more messages wait loses its stream."""
        self._sessions, self._attendance = sessions, attendance
        self._limits, self._most_waiting = limits, most_waiting

    async def attend(self, request: pb.AttendRequest) -> AsyncIterator[pb.AttendResponse]:
        """Yields the messages pushed to the client. It is present for as long as this is read.

        The first ones answer what the request asks about. They are looked up while the stream is open, so that nothing
        falls between them and what is pushed.

        Raises UnknownSessionError, Forbidden, InvalidInput, StoreError.
        """
        session, certificate = self._sessions.of_call(request.session_id), shown_certificate(request)
        check_questions(request)
        if session.stream is not None:
            session.stream.end()
        stream = session.stream = Stream()
        stream.push(pb.AttendResponse(attached=pb.Attached()))
        client_id = session.client_id
        try:
            outcomes, ended_runs = await self._attendance.changes.listener.settled(request, client_id)
            for outcome in outcomes:
                stream.push(pb.AttendResponse(outcome=outcome))
            for run_id in ended_runs:
                stream.push(pb.AttendResponse(run_ended=pb.RunEnded(run_id=run_id)))
            await self._attendance.begun(client_id, certificate)
            async for message in stream:
                yield message
        finally:
            if session.stream is stream:
                session.stream = None
            stream.closed.set()
            # A fenced stream ends late, when its client is attached again.
            if not self._attendance.attached(client_id):
                self._attendance.stream_lost(client_id)

    def push(self, client_id: str, message: pb.AttendResponse) -> bool:
        """Push a message if the client is attached. A client that is not gets its work when it attaches."""
        self._grant_calls(client_id, message)
        session = self._sessions.of(client_id)
        if session is not None and session.stream is not None and session.stream.unread(self._most_waiting):
            self._drop_unread(session, session.stream)
        return self._sessions.push(client_id, message)

    def _grant_calls(self, client_id: str, message: pb.AttendResponse) -> None:
        """New work grants the calls that it needs."""
        if message.HasField("assignment"):
            key, attempt = message.assignment.key, message.assignment.attempt
            self._limits.assigned(client_id, (key.run_id, key.round, key.exchange, attempt))
        elif message.HasField("evaluation"):
            self._limits.assigned(client_id, (message.evaluation.key.run_id, message.evaluation.key.round))
        elif message.HasField("package"):
            self._limits.assigned(client_id, ("package", message.package.name, message.package.digest))
        elif message.HasField("release"):
            self._limits.assigned(client_id, ("release", message.release.model, message.release.version))

    def _drop_unread(self, session: Session, stream: Stream) -> None:
        """End the stream of a client that reads nothing. It registers again and is sent its outstanding work."""
        client_id = session.client_id
        excess = Excess(
            "messages", f"{counted(self._most_waiting, 'message')} waiting (transfers.messages_waiting)", 0.0
        )
        self._limits.exceeded(client_id, excess)
        stream.drop(UnknownSessionError())
        session.stream = None
        self._sessions.close(client_id, UnknownSessionError())
        self._attendance.stream_lost(client_id)
