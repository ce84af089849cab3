"""The clients of one coordinator: sessions, presence, and the messages pushed to each.

Presence follows the Attend streams: a client with a lost stream is suspect, and after the grace it is lost. Client
records are also in the ledger, so that a restarted coordinator knows for which clients to wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import structlog

from fl_common.rate_limits import TokenBuckets
from fl_server.clients.client_records import ClientRecords, FleetChanges
from fl_server.clients.contested_identities import ContestedIdentities
from fl_server.clients.draw_rules import Candidate
from fl_server.clients.eligibility import Eligibility
from fl_server.clients.quarantine import Quarantine
from fl_server.clients.registration import Registration
from fl_server.clients.roster import Presence, Roster
from fl_server.clients.sessions import Session, Sessions, Stream, Transfer, Transfers
from fl_server.clients.transfer_limits import Excess, TransferLimits
from fl_server.config import ServerConfig
from fl_server.errors import Forbidden, UnknownSessionError
from fl_server.identity import Identity, require_name
from fl_server.metrics import Metrics
from fl_server.store.ledger import Ledger
from fl_server.store.records import ClientRecord, HistoryRecord, QuarantineRecord
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()


class Fleet:
    """All clients of one coordinator. Lives on the event loop."""

    def __init__(self, ledger: Ledger, config: ServerConfig, metrics: Metrics) -> None:
        self._ledger = ledger
        self._grace_s = config.limits.reattach_grace_s
        self._most_waiting = config.transfers.messages_waiting
        self._metrics = metrics
        self.changes = FleetChanges(lambda: len(self.records), self._update_metrics)
        self.records = ClientRecords(ledger, self.changes)
        self.sessions = Sessions()
        self._roster = Roster(self._grace_s)
        self._transfers = Transfers()
        self.transfer_limits = TransferLimits(config.transfers, metrics, config.limits.max_clients)
        self.quarantine = Quarantine(config.quarantine)
        returns = TokenBuckets(config.limits.comebacks_per_min, 60.0)
        self.eligibility = Eligibility(self.records, self._roster, self.quarantine, returns)
        self.contested = ContestedIdentities(
            self.sessions, lambda client_id: bool(self.eligibility.run_of(client_id)), metrics
        )
        self.registration = Registration(config, self.records, self.sessions, self.contested)
        self._tick_timer: asyncio.TimerHandle | None = None
        self._seen: dict[str, float] = {}
        """By client: Unix time of its latest call or lost stream. In memory only: a call costs no write."""

    async def start(self) -> None:
        """Read the clients back from the ledger. Those that were present are waited for."""
        await self.records.load()
        records = self.records.in_memory().values()
        self.contested.restore(records)
        expected = [record.client_id for record in records if record.present and not record.banned]
        self._roster.expect(expected, time.monotonic())
        self._tick_later()
        if expected:
            log.info("roster_awaited", clients=len(expected), grace_s=self._grace_s)
        self.quarantine.restore(await self._ledger.do(self._ledger.store.quarantine_records))
        for client_id in self.quarantine.clients():
            self.eligibility.quarantine_changed(client_id)
        self.changes.changed()

    # Sessions.

    async def register(self, request: pb.RegisterRequest) -> tuple[Session, int]:
        """Open a session. Returns it and the protocol version."""
        session, protocol = await self.registration.register(request, self._close_unattended)
        self.eligibility.registered(request)
        self._metrics.sessions.set(len(self.sessions))
        return session, protocol

    def refuse_holder(self, who: Identity) -> None:
        """Raises Forbidden for the certificate of a banned client, before a request of it is received."""
        if who.role == "client":
            self.records.refuse_banned(who.name)

    def _close_unattended(self, session: Session) -> None:
        """Close the session of a client that registered and never attended: it has no stream that could be lost."""
        client_id = session.client_id
        waited_for = client_id in self._roster
        if self.sessions.of(client_id) is session and session.stream is None and not waited_for:
            self.sessions.close(client_id, UnknownSessionError())
            self._update_metrics()

    def update_admitted(self, session_id: str) -> None:
        """An update was admitted in this session: its daemon is the one that works under the identity."""
        with suppress(UnknownSessionError):  # a newer session has fenced it
            self.contested.update_admitted(self.sessions.get(session_id))

    def session(self, session_id: str) -> Session:
        """The open session in which a call is made. Raises UnknownSessionError, Forbidden."""
        session = self.sessions.get(session_id)
        require_name(session.client_id)
        self._seen[session.client_id] = time.time()
        return session

    @contextmanager
    def transfer(self, session_id: str) -> Iterator[Transfer]:
        """An upload or download in a session; a ban ends it. Raises UnknownSessionError, Forbidden."""
        session = self.session(session_id)
        with self._transfers.open(session.client_id, session) as transfer:
            yield transfer

    # The Attend stream.

    async def attend(self, session_id: str) -> AsyncIterator[pb.AttendResponse]:
        """Yields the messages pushed to the client. It is present for as long as this is read."""
        session = self.session(session_id)
        if session.stream is not None:
            session.stream.end()
        stream = session.stream = Stream()
        stream.push(pb.AttendResponse(attached=pb.Attached()))
        client_id = session.client_id
        before = (self._roster.settled, client_id in self._roster)
        self._roster.attached(client_id, time.monotonic())
        eligibility_changed = before != (self._roster.settled, True)
        log.debug("client_attached", client=client_id)
        try:
            await self._set_present(client_id, True)
            self.changes.attached(client_id)
            self.changes.changed(eligibility=eligibility_changed)
            async for message in stream:
                yield message
        finally:
            if session.stream is stream:
                session.stream = None
            stream.closed.set()
            # A fenced stream ends late, when its client is attached again.
            if not self.attached(client_id):
                self._stream_lost(client_id)

    def push(self, client_id: str, message: pb.AttendResponse) -> bool:
        """Push a message if the client is attached. A client that is not gets its work when it attaches."""
        self._grant_calls(client_id, message)
        session = self.sessions.of(client_id)
        if session is not None and session.stream is not None and session.stream.unread(self._most_waiting):
            self._drop_unread(session, session.stream)
        return self.sessions.push(client_id, message)

    def push_all(self, message: pb.AttendResponse) -> None:
        """Push a message to every attached client."""
        self.sessions.push_all(message)

    def _grant_calls(self, client_id: str, message: pb.AttendResponse) -> None:
        """New work grants the calls that it needs."""
        if message.HasField("assignment"):
            key, attempt = message.assignment.key, message.assignment.attempt
            self.transfer_limits.assigned(client_id, (key.run_id, key.round, key.exchange, attempt))
        elif message.HasField("evaluation"):
            self.transfer_limits.assigned(client_id, (message.evaluation.key.run_id, message.evaluation.key.round))

    def _drop_unread(self, session: Session, stream: Stream) -> None:
        """End the stream of a client that reads nothing. It registers again and is sent its outstanding work."""
        client_id = session.client_id
        excess = Excess("messages", f"{self._most_waiting} messages waiting (transfers.messages_waiting)", 0.0)
        self.transfer_limits.exceeded(client_id, excess)
        stream.drop(UnknownSessionError())
        session.stream = None
        self.sessions.close(client_id, UnknownSessionError())
        self._stream_lost(client_id)

    # Presence.

    @property
    def settled(self) -> bool:
        """False after a start until every expected client is back or was waited for."""
        return self._roster.settled

    def present(self) -> tuple[str, ...]:
        """Clients that are attached, or may come back within the grace."""
        return self._roster.present()

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
        presence = self._roster.state_of(client_id)
        return presence.value if presence is not None else "lost"

    def count(self, presence: Presence) -> int:
        """The number of clients in a state. Those that were not here since the coordinator's start have none."""
        return self._roster.count(presence)

    def last_seen(self, record: ClientRecord) -> float:
        """Unix time of a client's latest sign of life. Keepalives prove that a client with an open stream is there."""
        if self.attached(record.client_id):
            return time.time()
        return self._seen.get(record.client_id, record.last_seen)

    def _stream_lost(self, client_id: str) -> None:
        self._seen[client_id] = time.time()
        self._roster.stream_lost(client_id, time.monotonic())
        self.changes.changed(eligibility=False)
        self._tick_later()

    def _tick_later(self) -> None:
        """Set the timer for the first grace that ends: one timer, however many clients are suspect."""
        if self._tick_timer is not None or (left := self._roster.next_tick(time.monotonic())) is None:
            return
        # A little after the grace, so that the roster's clock agrees that it is over.
        pause = max(0.02, self.changes.shortest_pause_s)
        self._tick_timer = asyncio.get_running_loop().call_later(left + pause, self._tick)

    def _tick(self) -> None:
        self._tick_timer = None
        self.tick()
        self._tick_later()

    def tick(self) -> None:
        """Give up the clients whose grace is over."""
        for client_id in self._roster.tick(time.monotonic()):
            log.info("client_lost", client=client_id, grace_s=self._grace_s)
            # The client registers again when it comes back. Otherwise sessions would pile up.
            self.sessions.close(client_id, UnknownSessionError())
            self.records.in_background(partial(self._write_absence, client_id))
            self.changes.gone(client_id, "lost")
        self.changes.changed()

    async def _write_absence(self, client_id: str) -> None:
        """Record that a client is lost, so that a restart does not wait for it; unless it has come back."""
        if self.state(client_id) == "lost":
            detail = f"not attached for {self._grace_s:g} s"
            why = HistoryRecord(time.time(), "coordinator", "client_lost", client_id, detail)
            await self._set_present(client_id, False, why)

    async def _set_present(self, client_id: str, present: bool, why: HistoryRecord | None = None) -> None:
        record = self.records.find(client_id)
        if record is not None and record.present != present:
            await self.records.write(replace(record, present=present, last_seen=self.last_seen(record)), why)

    def _update_metrics(self) -> None:
        self._metrics.clients.labels("present").set(self._roster.count(Presence.PRESENT))
        self._metrics.clients.labels("suspect").set(self._roster.count(Presence.SUSPECT))
        self._metrics.sessions.set(len(self.sessions))
        self._metrics.quarantined.set(len(self.quarantine.clients()))

    @property
    def version(self) -> int:
        """Increases whenever some client's eligibility may have changed."""
        return self.changes.version

    # Records, quarantine, bans, and clients that are forgotten.

    def known(self, client_id: str) -> ClientRecord | None:
        """A client's record; None if it never registered, or was forgotten."""
        return self.records.find(client_id)

    def record(self, client_id: str) -> ClientRecord:
        """A client's record. Raises NoSuchClient."""
        return self.records.get(client_id)

    def candidate(self, client_id: str) -> Candidate | None:
        """A client as the rules of drawing see it; None if it never registered, or was forgotten."""
        record = self.records.find(client_id)
        return None if record is None else self.eligibility.candidate(record, self.last_seen(record))

    async def note(self, client_id: str, text: str) -> None:
        """Store a note on a client for operators: its last failure."""
        await self.records.write_note(client_id, text)

    async def clear_notes(self, clients: Iterable[str]) -> None:
        """Remove the notes on failures of clients whose updates count now. A reason of an operator stays."""
        for client_id in clients:
            record = self.known(client_id)
            if record is not None and record.note and not (record.banned or record.draining):
                await self.note(client_id, "")

    def banned(self, client_id: str) -> bool:
        """Whether nothing of the client counts: it is banned, or was forgotten."""
        record = self.records.find(client_id)
        return record is None or record.banned

    def keep_refusals(self, refusals: QuarantineRecord, why: HistoryRecord | None) -> None:
        """Keep a client's refusals, which are in the ledger. `why`: the history row of a new quarantine."""
        self.quarantine.keep(refusals)
        if why is None:
            return
        self._metrics.quarantines.inc()
        log.warning("client_quarantined", client=refusals.client_id, why=why.detail)
        text = f"the coordinator gives this client no work {why.detail}"
        self.push(refusals.client_id, pb.AttendResponse(notice=pb.Notice(text=text)))
        self.eligibility.quarantine_changed(refusals.client_id)

    def release(self, client_id: str) -> None:
        """Drop the client's refusals here, and let it back into all runs. The ledger has done so already."""
        self.changes.released(client_id)
        self.eligibility.release(client_id)

    def expel(self, client_id: str, needed: str, reason: str) -> None:
        """End what the client does, and wait for it no longer. `needed`: what its errors name as the way back."""
        self._end(client_id, needed)
        self.changes.gone(client_id, reason)

    def forget(self, client_id: str) -> None:
        """Expel the client, and drop all that is known of it. A ban stays."""
        self.records.forget(client_id)
        self._end(client_id, "to register again: it was forgotten here")
        self._seen.pop(client_id, None)
        self.eligibility.forget(client_id)
        self.contested.forget(client_id)
        self.registration.forget(client_id)
        self.changes.gone(client_id, "forgotten")

    def _end(self, client_id: str, needed: str) -> None:
        """End the client's session and transfers."""
        error = Forbidden(f"client:{client_id}", needed)
        self.sessions.close(client_id, error)
        self._transfers.end(client_id, error)
        self._roster.forget(client_id)
