"""The clients: who is registered, who is here, and how to reach each of them.

Presence comes from the Attend streams: a lost stream makes a client suspect, and after the grace lost. Everything
known about a client is also in the ledger, so that a restarted coordinator knows whom to wait for. Who of them may be
drawn says `workforce.py`, and what operators say of them `operators.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import structlog

from fl_server.clients.allowance import Excess
from fl_server.clients.duels import Duels
from fl_server.clients.per_minute import PerMinute
from fl_server.clients.rare_lines import RareLines
from fl_server.clients.transfer_limits import TransferLimits
from fl_server.config import ServerConfig
from fl_server.door import Door
from fl_server.errors import (
    Contested,
    Forbidden,
    InvalidInput,
    NoSuchClient,
    NotNow,
    UnknownSessionError,
)
from fl_server.identity import Identity, require_name
from fl_server.ledger import Ledger, until_room
from fl_server.metrics import Metrics
from fl_server.quarantine import Quarantine
from fl_server.registration import check_sizes, checked_id, common_protocol, record_of
from fl_server.roster import Roster
from fl_server.sessions import Origin, Session, Sessions, Stream, origin_of_call
from fl_server.store.base import ClientRecord, HistoryRecord, Standing, StoreError, only_banned
from fl_server.transfers import Transfer, Transfers
from fl_server.workforce import Calls, Workforce
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()

HOLD_S = 10.0
"""A client whose time at the door is not further away waits in its call, which daemons give 20 s: coming again would
cost both sides a call and a connection more."""
PAUSE_A_CLIENT_S = 20e-6
"""For each client known, between two looks at all of them: ten thousand that come at once are looked at now and then,
not ten thousand times."""


class FleetListener(Protocol):
    """Who is told about comings and goings."""

    def client_attached(self, client_id: str) -> None:
        """The client can be reached; push what it still has to do."""

    def client_available(self, client_id: str) -> None:
        """The client may train again: ask it once more for what it gave up and is still wanted."""

    def client_released(self, client_id: str) -> None:
        """An operator lets the client take part again."""

    def client_gone(self, client_id: str, reason: str) -> None:
        """The client is lost, banned or forgotten: do not wait for it."""

    def fleet_changed(self) -> None:
        """Who may be drawn may have changed."""


class Fleet:
    """All clients of one coordinator. Lives on the event loop."""

    def __init__(self, ledger: Ledger, config: ServerConfig, metrics: Metrics) -> None:
        self._ledger = ledger
        self._limits = config.limits
        self._metrics = metrics
        self._sessions = Sessions()
        self._door = Door(config.limits.registrations_per_s)
        self._transfers = Transfers()
        self._most_waiting = config.transfers.messages_waiting
        self.transfer_limits = TransferLimits(config.transfers, metrics, config.limits.max_clients)
        self._roster = Roster(config.limits.reattach_grace_s)
        self.quarantine = Quarantine(config.quarantine)
        self._records: dict[str, ClientRecord] = {}
        calls = Calls(self._changed, self._came_back, PerMinute(config.limits.comebacks_per_min))
        self.workforce = Workforce(self._records, self._roster, self.quarantine, calls)
        self.duels = Duels(self._sessions, lambda client_id: bool(self.workforce.run_of(client_id)), metrics)
        self._lines = RareLines(config.limits.history_per_minute, self._write_later)
        self.listener: FleetListener | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._pause_s = 0.0
        """Between two looks at everybody."""
        self.version = 0
        """Goes up whenever somebody's eligibility may have changed."""

    async def start(self) -> None:
        """Read the roster back; who was here before is waited for."""
        for record in await self._ledger.do(self._ledger.store.clients):
            self._records[record.client_id] = record
        self.duels.read_back(self._records.values())
        expected = [record.client_id for record in self._records.values() if record.present and not record.banned]
        self._roster.expect(expected, time.monotonic())
        self._tick_later()
        if expected:
            log.info("roster_awaited", clients=len(expected), grace_s=self._limits.reattach_grace_s)
        self.quarantine.read_back(await self._ledger.do(self._ledger.store.standings))
        for client_id in self.quarantine.clients():
            self.workforce.wait_out(client_id)
        self._changed()

    # Sessions.

    async def register(self, request: pb.RegisterRequest) -> tuple[Session, int]:
        """Open a session; returns it and the protocol version to speak."""
        client_id = checked_id(request.client_id)
        require_name(client_id)
        self._refuse_unwanted(client_id)
        protocol = common_protocol(request.protocol)
        check_sizes(request)
        if not request.tasks:
            raise InvalidInput("tasks", "at least one task that the client can train", "none")
        await self._come_in(client_id)
        await self._settle(client_id, origin := origin_of_call(request.instance_id))
        known = self._records.get(client_id)
        session, older = self._sessions.open(client_id, origin)
        asyncio.get_running_loop().call_later(self._limits.reattach_grace_s, self._close_unattended, session)
        await self.remember(record_of(request, known), self._registration(session, older))
        self.workforce.registered(request)
        self._metrics.sessions.set(len(self._sessions))
        return session, protocol

    async def _come_in(self, client_id: str) -> None:
        """Wait for the client's time at the door. Raises NotNow when that is too long for one call."""
        while wait_s := self._door.wait(client_id, time.monotonic()):
            if wait_s > HOLD_S:
                raise NotNow("many clients come at once", wait_s, routine=True)
            await asyncio.sleep(wait_s)
            self._refuse_unwanted(client_id)

    async def _settle(self, client_id: str, newcomer: Origin) -> None:
        """Let the identity's daemon that works go on. Raises Contested; Forbidden for what was decided meanwhile."""
        while True:
            try:
                waited = await self.duels.settle(client_id, newcomer)
            except Contested:
                works = self._sessions.of(client_id)
                at_work = f"{works.instance_id} at {works.origin.address or 'an unknown address'}" if works else ""
                detail = f"{newcomer.instance_id} at {newcomer.address or 'an unknown address'}: {at_work} is at work"
                if why := self._lines.passed(_history(client_id, "client_contested", detail)):
                    self._write_later(why)
                raise
            if not waited:
                return
            self._refuse_unwanted(client_id)

    def _write_later(self, why: HistoryRecord) -> None:
        """A line of history that goes with no other change."""
        _in_background(until_room(_not_written, partial(self._ledger.do, self._ledger.store.add_history, why)))

    def _refuse_unwanted(self, client_id: str) -> None:
        """Raises Forbidden, NotNow."""
        self._refuse_banned(client_id)
        if len(self._sessions) >= self._limits.max_clients and self._sessions.of(client_id) is None:
            raise NotNow(f"{self._limits.max_clients} clients are connected, which is the limit here", 60.0)

    def refuse_holder(self, who: Identity) -> None:
        """Raises Forbidden for the certificate of a client that is banned: before any request of it is received."""
        if who.role == "client":
            self._refuse_banned(who.name)

    def _refuse_banned(self, client_id: str) -> None:
        known = self._records.get(client_id)
        if known is not None and known.banned:
            raise Forbidden(f"client:{client_id}", f"to be unbanned (banned: {known.note or 'no reason given'})")

    def _close_unattended(self, session: Session) -> None:
        """Whoever registered and never attended has no stream to lose, so nobody else gives it up."""
        client_id = session.client_id
        waited_for = client_id in self._roster.present()
        if self._sessions.of(client_id) is session and session.stream is None and not waited_for:
            self._sessions.close(client_id, UnknownSessionError())
            self._count()

    def _registration(self, session: Session, older: Session | None) -> HistoryRecord | None:
        client_id = session.client_id
        if older is not None and older.instance_id != session.instance_id and older.stream is not None:
            self.duels.fenced(older, session)
            came, went = session.origin.address, older.origin.address
            places = f" ({went} by {came})" if came or went else ""
            fenced = f"{older.instance_id} by {session.instance_id}{places}"
            return self._lines.passed(_history(client_id, "client_fenced", fenced))
        known = self._records.get(client_id)
        if known is None:
            log.info("client_registered", client=client_id)
            return _history(client_id, "client_registered", session.instance_id)
        back = None if known.present else _history(client_id, "client_back", session.instance_id)
        return back and self._lines.passed(back)

    def proved(self, session_id: str) -> None:
        """An update was admitted in this session: its daemon is the one that works under the identity."""
        with suppress(UnknownSessionError):  # it was fenced meanwhile
            self.duels.proved(self._sessions.get(session_id))

    def open_session(self, client_id: str) -> Session | None:
        """The client's open session, attended or not."""
        return self._sessions.of(client_id)

    def session(self, session_id: str) -> Session:
        """An open session, for a call made in it. Raises UnknownSessionError, Forbidden."""
        session = self._sessions.get(session_id)
        require_name(session.client_id)
        return session

    @contextmanager
    def transfer(self, session_id: str) -> Iterator[Transfer]:
        """An upload or download in a session; a ban ends it. Raises UnknownSessionError, Forbidden."""
        with self._transfers.open(self.session(session_id).client_id) as transfer:
            yield transfer

    async def attend(self, session_id: str) -> AsyncIterator[pb.AttendResponse]:
        """The client is present for as long as this is read; yields what is pushed to it."""
        session = self.session(session_id)
        if session.stream is not None:
            session.stream.end()
        stream = session.stream = Stream()
        stream.push(pb.AttendResponse(attached=pb.Attached()))
        client_id = session.client_id
        before = (self._roster.settled, client_id in self._roster)
        self._roster.attached(client_id, time.monotonic())
        drawable = before != (self._roster.settled, True)
        log.debug("client_attached", client=client_id)
        try:
            await self._set_present(client_id, True)
            if self.listener is not None:
                self.listener.client_attached(client_id)
            self._changed(drawable=drawable)
            async for message in stream:
                yield message
        finally:
            if session.stream is stream:
                session.stream = None
            stream.closed.set()
            # A stream that was fenced ends late: its client is here all the same.
            if not self.attached(client_id):
                self._stream_lost(client_id)

    def _stream_lost(self, client_id: str) -> None:
        self._roster.stream_lost(client_id, time.monotonic())
        self._changed(drawable=False)
        self._tick_later()

    def _tick_later(self) -> None:
        """Look whose grace is over when the first one's is: one timer, however many are gone."""
        if self._ticking is not None or (left := self._roster.next_tick(time.monotonic())) is None:
            return
        # Behind the grace by a little, so that the roster's own clock agrees that it is over.
        pause = max(0.02, PAUSE_A_CLIENT_S * len(self._records))
        self._ticking = asyncio.get_running_loop().call_later(left + pause, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        self.tick()
        self._tick_later()

    def tick(self) -> None:
        """Give up those whose grace is over."""
        lost = self._roster.tick(time.monotonic())
        for client_id in lost:
            log.info("client_lost", client=client_id, grace_s=self._limits.reattach_grace_s)
            # It registers again when it comes back: a session for each client that ever came would be a leak.
            self._sessions.close(client_id, UnknownSessionError())
            _in_background(until_room(_not_written, partial(self._keep_absence, client_id)))
            self._gone(client_id, "lost")
        self._changed()

    def push(self, client_id: str, message: pb.AttendResponse) -> bool:
        """Push to a client that is attached; others are told when they attach."""
        self._given(client_id, message)
        session = self._sessions.of(client_id)
        if session is not None and session.stream is not None and session.stream.unread(self._most_waiting):
            self._drop_unread(session, session.stream)
        return self._sessions.push(client_id, message)

    def _given(self, client_id: str, message: pb.AttendResponse) -> None:
        """New work entitles the client to the calls that it takes."""
        if message.HasField("assignment"):
            key, attempt = message.assignment.key, message.assignment.attempt
            self.transfer_limits.given(client_id, (key.run_id, key.round, key.exchange, attempt))
        elif message.HasField("evaluation"):
            self.transfer_limits.given(client_id, (message.evaluation.key.run_id, message.evaluation.key.round))

    def _drop_unread(self, session: Session, stream: Stream) -> None:
        """Let go of what waits for a client that reads nothing; it registers again, and is told what it missed."""
        client_id = session.client_id
        excess = Excess("messages", f"{self._most_waiting} messages waiting (transfers.messages_waiting)", 0.0)
        self.transfer_limits.exceeded(client_id, excess)
        stream.drop(UnknownSessionError())
        session.stream = None
        self._sessions.close(client_id, UnknownSessionError())
        self._stream_lost(client_id)

    def push_all(self, message: pb.AttendResponse) -> None:
        """Push to everybody who is attached."""
        self._sessions.push_all(message)

    def attached(self, client_id: str) -> bool:
        """Whether the client can be reached now."""
        session = self._sessions.of(client_id)
        return session is not None and session.stream is not None

    # Who is here.

    @property
    def settled(self) -> bool:
        """False after a start until everybody who was here is back or was waited for."""
        return self._roster.settled

    def present(self) -> tuple[str, ...]:
        """Clients that are here, or may come back within the grace."""
        return self._roster.present()

    def state(self, client_id: str) -> str:
        """One of "present", "suspect" or "lost"."""
        presence = self._roster.state_of(client_id)
        return presence.value if presence is not None else "lost"

    # What is known of each.

    def known(self, client_id: str) -> ClientRecord | None:
        """What is known of a client; None if it never came, or was forgotten."""
        return self._records.get(client_id)

    def record(self, client_id: str) -> ClientRecord:
        """What is known of a client. Raises NoSuchClient."""
        record = self.known(client_id)
        if record is None:
            raise NoSuchClient(client_id)
        return record

    def banned(self, client_id: str) -> bool:
        """Whether nothing of the client counts: it is banned, or was forgotten."""
        record = self.known(client_id)
        return record is None or record.banned

    async def records(self) -> list[ClientRecord]:
        """All clients in the order of id bytes, with the counters that only the ledger moves."""
        return await self._ledger.do(self._ledger.store.clients)

    async def note(self, client_id: str, text: str) -> None:
        """Keep a word on a client for operators to see: its last failure."""
        record = self.known(client_id)
        if record is not None and record.note != text:
            await self._write(replace(record, note=text), None)  # nobody may be drawn, or not be drawn, for a note

    async def remember(self, record: ClientRecord, why: HistoryRecord | None) -> None:
        """Know this of a client from now on, here and in the ledger. Raises StoreError, and then nothing is changed."""
        await self._write(record, why)
        self._changed()

    async def _write(self, record: ClientRecord, why: HistoryRecord | None) -> None:
        before = self._records.get(record.client_id)
        self._records[record.client_id] = record
        try:
            await self._ledger.put_client(record, why)
        except StoreError:
            self._take_back(record, before)
            raise

    def _take_back(self, record: ClientRecord, before: ClientRecord | None) -> None:
        """What could not be written does not hold here either: a restart would not know of it."""
        if self._records.get(record.client_id) is record:
            del self._records[record.client_id]
            if before is not None:
                self._records[record.client_id] = before

    # Who gets no work, and who has to go.

    def keep_standing(self, standing: Standing, why: HistoryRecord | None) -> None:
        """An update was refused, and this is in the ledger; `why` where the client is quarantined for it."""
        self.quarantine.keep(standing)
        if why is None:
            return
        self._metrics.quarantines.inc()
        log.warning("client_quarantined", client=standing.client_id, why=why.detail)
        text = f"the coordinator gives this client no work {why.detail}"
        self.push(standing.client_id, pb.AttendResponse(notice=pb.Notice(text=text)))
        self.workforce.wait_out(standing.client_id)

    def release(self, client_id: str) -> None:
        """Nothing stands against the client any more, in the ledger and here, and no run leaves it out."""
        if self.listener is not None:
            self.listener.client_released(client_id)
        self.workforce.release(client_id)

    def expel(self, client_id: str, needed: str, reason: str) -> None:
        """Nobody waits for the client any more; what it needs to come back stands in the errors that it gets."""
        self._end(client_id, needed)
        self._gone(client_id, reason)

    def forget(self, client_id: str) -> None:
        """The client is expelled, and nothing is known of it any more but its ban, if it is banned."""
        known = self._records.pop(client_id, None)
        if known is not None and known.banned:
            self._records[client_id] = only_banned(known)
        self._end(client_id, "to register again: it was forgotten here")
        self.workforce.forget(client_id)
        self.duels.forget(client_id)
        self._lines.forget(client_id, "client_registered", "client_back", "client_fenced", "client_contested")
        self._gone(client_id, "forgotten")

    def _end(self, client_id: str, needed: str) -> None:
        """End all that the client does here, its transfers too."""
        error = Forbidden(f"client:{client_id}", needed)
        self._sessions.close(client_id, error)
        self._transfers.end(client_id, error)
        self._roster.forget(client_id)

    # Inside.

    async def _keep_absence(self, client_id: str) -> None:
        """A restart need not wait for a client that was lost; unless it has come back since."""
        if self.state(client_id) == "lost":
            gone = f"not attached for {self._limits.reattach_grace_s:g} s"
            why = HistoryRecord(time.time(), "coordinator", "client_lost", client_id, gone)
            await self._set_present(client_id, False, why)

    async def _set_present(self, client_id: str, present: bool, why: HistoryRecord | None = None) -> None:
        record = self._records.get(client_id)
        if record is not None and record.present != present:
            await self.remember(replace(record, present=present, last_seen=time.time()), why)

    def _came_back(self, client_id: str) -> None:
        if self.listener is not None:
            self.listener.client_available(client_id)

    def _gone(self, client_id: str, reason: str) -> None:
        if self.listener is not None:
            self.listener.client_gone(client_id, reason)
        self._changed()

    @property
    def told(self) -> bool:
        """Whether everybody who is told of changes knows of the latest."""
        return self._telling is None

    def _changed(self, *, drawable: bool = True) -> None:
        """drawable: who may be drawn may have changed, for which every run looks at all clients."""
        self.version += drawable
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(self._pause_s, self._tell)

    def _tell(self) -> None:
        """Count, and tell of all changes since the last time at once: each costs a look at everybody."""
        loop = asyncio.get_running_loop()
        self._telling, began = None, loop.time()
        self._count()
        if self.listener is not None:
            self.listener.fleet_changed()
        self._pause_s = max(PAUSE_A_CLIENT_S * len(self._records), 20 * (loop.time() - began))

    def _count(self) -> None:
        present = self._roster.present()
        attached = sum(self.attached(client_id) for client_id in present)
        self._metrics.clients.labels("present").set(attached)
        self._metrics.clients.labels("suspect").set(len(present) - attached)
        self._metrics.sessions.set(len(self._sessions))
        self._metrics.quarantined.set(len(self.quarantine.clients()))


_background: set[asyncio.Task[None]] = set()


def _in_background(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)


def _not_written(why: str) -> None:
    if why:
        log.warning("presence_not_written", error=why)


def _history(client_id: str, event: str, detail: str) -> HistoryRecord:
    return HistoryRecord(time.time(), f"client:{client_id}", event, client_id, detail)
