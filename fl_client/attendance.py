"""Staying connected: register, attend, and come back for ever with growing waits.

When certificates are renewed, the session moves: it is attended on a new connection before the old one is left, so
that nothing is missed and nobody is lost. Calls under way end where they began.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog

from fl_client.connection.pace import Pace
from fl_client.connection.reading import asked_for, check_registration, seconds_of, text
from fl_client.connection.sessions import session_of
from fl_client.desk import Desk
from fl_client.errors import (
    ClientError,
    Contested,
    Fenced,
    NotAllowed,
    ProtocolMismatch,
    Refused,
    SessionLost,
    StartError,
    TransportError,
    Unreachable,
)
from fl_client.link import Backoff, Calls, Link, Session, Waits
from fl_client.stream import Stream
from fl_client.transport import Connect, Connection
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()

LAST_WORDS_S = 20.0
"""Patience with a stream that the coordinator ends because its session moves."""

CONNECTS_PER_S, CONNECTS_AT_ONCE = 0.5, 30
"""How often a connection is made, whatever the coordinator answers: in the long run, and at once."""

EVENTS_PER_S, EVENTS_AT_ONCE = 500.0, 1000
"""How many events are taken; a coordinator that pushes more has to wait."""

NOTICES_PER_S, NOTICES_AT_ONCE = 0.1, 10
"""How many words for the owner are logged; others are dropped."""

BLOCKED_AT_MOST = 10
"""Times `Waits.blocked`, between two tries of a daemon that is refused again and again."""


Reason = Callable[[], Awaitable[None]]
"""Waits until there is a reason for a new connection although the one of the moment is well."""


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


@dataclass(frozen=True, slots=True)
class Door:
    """Where the coordinator is, and how one gets in."""

    server: str
    connect: Connect
    renewed: Reason = _never


class Attendance:
    """Keeps one attended session open, and the link informed of it."""

    def __init__(self, hello: Callable[[], pb.RegisterRequest], door: Door, link: Link) -> None:
        """hello: what this daemon says of itself now."""
        self._hello = hello
        self._door = door
        self._link = link
        self._session: pb.RegisterResponse | None = None
        self._backoff = Backoff(link.waits)
        blocked = link.waits.blocked
        self._blocked = Backoff(Waits(first=blocked, longest=BLOCKED_AT_MOST * blocked))
        self._connects = Pace(CONNECTS_PER_S, CONNECTS_AT_ONCE)
        self._events = Pace(EVENTS_PER_S, EVENTS_AT_ONCE)
        self._notices = Pace(NOTICES_PER_S, NOTICES_AT_ONCE)
        self._fenced_waits = replace(link.waits, first=link.waits.longest, longest=10 * link.waits.blocked)
        self._fenced = Backoff(self._fenced_waits)
        self._leaving: set[asyncio.Task[None]] = set()
        """Connections that the session has moved away from, while calls are under way there."""
        self._wait: float | None = None
        self._why = ""
        """What the coordinator wants us to wait before the next connection, and why it ended this one."""

    async def keep(self, desk: Desk) -> None:
        """Attend for ever, handing every event to `desk`."""
        try:
            while True:
                wait, why = await self._attend_once(desk)
                wait = max(wait, self._connects.delay())
                log.warning("disconnected", server=self._door.server, reason=why, next_try_seconds=round(wait, 1))
                desk.disconnected()
                await asyncio.sleep(wait)
        finally:
            for task in self._leaving:
                task.cancel()
            await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _attend_once(self, desk: Desk) -> tuple[float, str]:
        """A session for as long as it can be attended: the seconds before the next try, and why it ended."""
        known, backoff, began = self._session, self._backoff, time.monotonic()
        try:
            await self._attend(desk)
        except (SessionLost, Fenced) as error:
            self._session = None
            if isinstance(error, Fenced) and error.by_other_instance:
                return self._wait_as_fenced(time.monotonic() - began, error), str(error)
            if known is not None:
                backoff.reset()  # the coordinator is back and only wants to be told who this is
            return backoff.next(), str(error)
        except (ProtocolMismatch, NotAllowed, Refused, StartError) as error:
            self._session = None
            log.error("refused", reason=str(error), todo=_TODO[type(error)])
            return self._blocked.next(), str(error)
        except TransportError as error:
            if isinstance(error, Contested):
                log.error("identity_in_use", reason=str(error), todo=_TWO_DAEMONS)
            return backoff.after(error.wait), str(error)
        except Exception as error:  # whatever it is, the coordinator's next word may be one that can be read
            self._session = None
            log.exception("attendance_broken", server=self._door.server)
            return backoff.next(), f"{type(error).__name__}: {text(str(error))}"
        return backoff.after(self._wait), self._why

    def _wait_as_fenced(self, attended_s: float, error: Fenced) -> float:
        """Seconds to wait when another daemon took this one's place: coming back at once would be an endless fight.

        attended_s: how long this daemon had the place; where that was long, the waits begin anew.
        """
        if attended_s > self._fenced_waits.longest:
            self._fenced.reset()
        log.error("fenced", reason=str(error), todo=_TWO_DAEMONS)
        return self._fenced.next()

    async def _attend(self, desk: Desk) -> None:
        """One connection from beginning to end, or several, one behind the other."""
        self._wait, self._why = None, "the coordinator ended the stream"
        connection = self._door.connect()
        try:
            stream = await self._stream(connection, desk)
        except BaseException:
            await connection.close()
            raise
        renewal = asyncio.ensure_future(self._door.renewed())
        try:
            await stream.begin()
            while await self._take_until(stream, renewal, desk):
                stream, until = await self._move(stream, desk)
                renewal = asyncio.ensure_future(until())
        finally:
            renewal.cancel()
            self._link.close()
            await stream.close()

    async def _stream(self, connection: Connection, desk: Desk) -> Stream:
        """The session's stream; a session that the coordinator does not know any more is replaced at once, right here.

        After a restart of the coordinator that is every daemon's: each would need one more connection otherwise.
        """
        if self._session is not None:
            stream = self._stream_of(session_of(self._session, connection), desk)
            try:
                if not await stream.lost():
                    return stream
            except (asyncio.CancelledError, Unreachable):
                await stream.close()
                raise
            log.info("session_lost", server=self._door.server)
            self._session = None  # also if the door is full: whoever comes again does not ask for it again
        self._session = await self._register(connection, desk)
        return self._stream_of(session_of(self._session, connection), desk)

    def _stream_of(self, session: Session, desk: Desk) -> Stream:
        """A stream whose events are asked for at a bounded rate, and while the desk has room for what they ask."""

        async def ready() -> None:
            if delay := self._events.delay():
                await asyncio.sleep(delay)
            await desk.ready()

        return Stream(session, ready)

    async def _move(self, old: Stream, desk: Desk) -> tuple[Stream, Reason]:
        """The session's stream on a new connection; the old one, if there is no new one to be had.

        Returns the stream, and what to wait for before the next move.
        """
        new = self._stream_of(replace(old.session, connection=self._door.connect(), calls=Calls()), desk)
        try:
            here = await self._take_until(old, new.coming, desk)
            first = await self._first(new, here)
            if first is None:
                await new.close()
                return old, partial(asyncio.sleep, self._link.waits.longest)
            if here:
                await self._last_words(old, desk)
        except BaseException:
            await new.close()
            raise
        self._take(first, new, desk)
        log.info("moved", server=self._door.server)
        leaving = asyncio.create_task(old.leave())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        return new, self._door.renewed

    async def _first(self, new: Stream, old_is_here: bool) -> pb.AttendResponse | None:
        """What the coordinator says first. None if it does not let us in, but has not let us go either."""
        try:
            if (first := await new.next()) is not None:
                return first
            raise Unreachable("the coordinator ended the stream")
        except (Unreachable, NotAllowed) as error:
            if not old_is_here:
                raise
            todo = "the earlier connection is kept; does the coordinator know the CA of the new certificate?"
            log.warning("not_moved", server=self._door.server, reason=str(error), todo=todo)
            return None

    async def _last_words(self, old: Stream, desk: Desk) -> None:
        """The coordinator has ended the old stream: what it pushed there comes before what it pushes on the new one."""
        with suppress(TransportError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                while (event := await old.next()) is not None:
                    self._take(event, old, desk)

    async def _take_until(self, stream: Stream, other: asyncio.Future[Any], desk: Desk) -> bool:
        """Take events until `other` is done. False: the stream has ended before."""
        while True:
            await asyncio.wait({stream.coming, other}, return_when=asyncio.FIRST_COMPLETED)
            if not stream.coming.done():
                return True
            if (event := stream.take()) is None:
                return False
            self._take(event, stream, desk)

    def _take(self, event: pb.AttendResponse, stream: Stream, desk: Desk) -> None:
        kind = event.WhichOneof("event")
        if not stream.greeted:
            if kind != "attached":
                raise Unreachable(f"expected Attached as the first event, got {kind or 'one that is not known here'}")
            stream.greeted = True
            self._backoff.reset()
            self._blocked.reset()
            self._link.open(stream.session)
            desk.attached()
            return
        match kind:
            case "attached":
                pass  # it is known
            case "retry":
                self._wait, self._why = seconds_of(event.retry.wait), text(event.retry.reason)
            case "drain":
                self._why = text(event.drain.reason) or "drained"
                log.info("drained", by_coordinator=event.drain.coordinator_leaving, reason=self._why)
            case "notice":
                if self._notices.free():
                    log.warning("notice", text=text(event.notice.text))
            case _:
                desk.take(event)

    async def _register(self, connection: Connection, desk: Desk) -> pb.RegisterResponse:
        request = self._hello()
        request.pending.extend(await desk.pending())
        request.states.extend(await desk.states())
        response = await connection.register(request)
        check_registration(response, request)
        log.info("registered", client=request.client_id, protocol=response.protocol)
        for event in asked_for(response, request):
            desk.take(event)
        return response


_TWO_DAEMONS = (
    "two daemons use one identity: end one of them; a copied device needs a client_id, a state_dir and a certificate "
    "of its own. This one tries again meanwhile, with growing waits"
)
_TODO: dict[type[ClientError], str] = {
    ProtocolMismatch: "upgrade the older side; this daemon tries again meanwhile",
    NotAllowed: "ask the coordinator's operator: the identity is banned, or the certificate is not for it",
    StartError: "put the file back; this daemon tries again meanwhile",
    Refused: "compare this daemon's configuration and version with the coordinator's",
}
