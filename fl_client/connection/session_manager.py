"""Keeps one attended session open: register, attend, and reconnect with growing waits.

When certificates are renewed, the session moves to a new connection. It is attended there before the old connection is
closed, so that no event is missed. Calls in progress end on the connection where they began.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import structlog

from fl_client import errors
from fl_client.connection.link import Link
from fl_client.connection.messages import clocks_differ, log_text, seconds_of
from fl_client.connection.reconnect import NEEDS_A_PERSON, Endpoint, ReconnectPolicy
from fl_client.connection.session import (
    EventHandler,
    EventStream,
    check_registration,
    requested_events,
    session_of,
    unanswered,
)
from fl_client.connection.transport import GrpcTransport
from fl_common.rate_limits import RateLimiter
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()

LAST_EVENTS_S = 20.0
"""Longest wait for the end of an old stream whose session has moved."""

EVENTS_PER_S, EVENT_BURST = 500.0, 1000
"""Limit of events that are taken. A coordinator that pushes more has to wait."""

NOTICES_PER_S, NOTICE_BURST = 0.1, 10
"""Limit of an operator's notices in the log. Others are dropped."""


class SessionManager:
    """Keeps one attended session open, and gives it to the link."""

    def __init__(self, endpoint: Endpoint, link: Link) -> None:
        self._endpoint, self._link = endpoint, link
        self._handler: EventHandler
        self._session: pb.RegisterResponse | None = None
        self._reconnect = ReconnectPolicy(link.delays)
        self._events = RateLimiter(EVENTS_PER_S, EVENT_BURST)
        self._notices = RateLimiter(NOTICES_PER_S, NOTICE_BURST)
        self._leaving: set[asyncio.Task[None]] = set()
        """Connections that the session has moved away from, with calls in progress."""
        self._wait: float | None = None
        self._reason = ""
        """The wait that the coordinator requested before the next connection, and why it ended this one."""
        self._needs_renewal = False
        """Whether the last connection failed in a way that renewed certificates may repair."""
        self._is_refused = False
        """Whether the coordinator refused this device itself in the last connection: banned, or revoked."""

    async def run(self, handler: EventHandler) -> None:
        """Attend until cancelled, and give every event to `handler`."""
        self._handler = handler
        try:
            while True:
                server = self._endpoint.server
                wait, reason = await self._attend_once()
                wait = self._reconnect.limit(wait)
                log.warning("disconnected", server=server, reason=reason, next_try_seconds=round(wait, 1))
                self._handler.disconnected(refused=self._is_refused)
                await self._sleep(wait)
        finally:
            for task in self._leaving:
                task.cancel()
            await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _sleep(self, seconds: float) -> None:
        """Wait before the next connection, or until the files are renewed where that may help."""
        if not self._needs_renewal:
            await asyncio.sleep(seconds)
            return
        with suppress(TimeoutError, errors.TransportError):
            async with asyncio.timeout(seconds):
                await self._endpoint.renewed()

    async def _attend_once(self) -> tuple[float, str]:
        """Attend one session until it ends. Returns the seconds before the next try, and why it ended."""
        known, began = self._session is not None, time.monotonic()
        self._needs_renewal = self._is_refused = False
        try:
            await self._attend()
        except (errors.TransportError, errors.StartError) as failed:
            error = self._endpoint.explained(failed) if isinstance(failed, errors.Unreachable) else failed
            self._needs_renewal = isinstance(error, (errors.InvalidCertificate, *NEEDS_A_PERSON))
            self._is_refused = isinstance(error, errors.NotAllowed)
            if isinstance(error, (errors.SessionLost, errors.Fenced, *NEEDS_A_PERSON)):
                self._session = None
            if isinstance(error, errors.Unreachable) and self._endpoint.try_next():
                return 0.0, str(error)
            return self._reconnect.after(error, time.monotonic() - began, was_registered=known), str(error)
        except Exception as error:  # a fault of the daemon must not end it; the next connection may work
            self._session = None
            log.exception("attendance_broken", server=self._endpoint.server)
            return self._reconnect.after_end(), f"{type(error).__name__}: {log_text(str(error))}"
        return self._reconnect.after_end(self._wait), self._reason

    async def _attend(self) -> None:
        """Attend on one connection, or on several in turn when the session moves."""
        self._wait, self._reason = None, "the coordinator ended the stream"
        connection = self._endpoint.connect()
        try:
            stream = await self._open_stream(connection)
        except BaseException:
            await connection.close()
            raise
        renewal = asyncio.ensure_future(self._endpoint.renewed())
        try:
            await stream.wait_for_first()
            while await self._take_until(stream, renewal):
                await renewal  # raises PolicyChanged
                before, stream = stream, await self._move(stream)
                has_moved = stream is not before
                renewal = asyncio.ensure_future(
                    self._endpoint.renewed() if has_moved else asyncio.sleep(self._link.delays.longest)
                )
        finally:
            renewal.cancel()
            self._link.close()
            await stream.close()

    async def _open_stream(self, connection: GrpcTransport) -> EventStream:
        """The session's stream. A session that the coordinator no longer knows is replaced on the same connection.

        After a restart of the coordinator this is the case for every daemon, and saves each a connection.
        """
        if self._session is not None:
            stream = self._stream(connection, await self._asked())
            try:
                if not await stream.session_is_lost():
                    return stream
            except (asyncio.CancelledError, errors.Unreachable):
                await stream.close()
                raise
            log.info("session_lost", server=self._endpoint.server)
            self._session = None  # also if the registration below is deferred: the next try must not ask for it again
        return self._stream(connection, await self._register(connection))

    async def _asked(self) -> pb.AttendRequest:
        """The updates and runs that the device does not know the end of."""
        pending, states = await self._handler.pending_updates(), await self._handler.client_states()
        return pb.AttendRequest(pending=pending, states=states)

    def _stream(self, connection: GrpcTransport, asked: pb.AttendRequest) -> EventStream:
        assert self._session is not None  # noqa: S101 - its callers have one
        return EventStream(session_of(self._session, connection), self._handler, self._events, asked)

    async def _move(self, old: EventStream) -> EventStream:
        """Move the session to a new connection. Returns the old stream if the new connection fails."""
        if self._session is None:
            return old
        asked = await self._asked()
        new = self._stream(self._endpoint.connect(), asked)
        try:
            old_is_open = await self._take_until(old, new.next_event)
            first = await self._first_event(new, old_is_open)
            if first is None:
                await new.close()
                return old
            if old_is_open:
                await self._take_last_events(old)
        except BaseException:
            await new.close()
            raise
        self._take(first, new)
        log.info("moved", server=self._endpoint.server)
        leaving = asyncio.create_task(old.close_after_calls())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        return new

    async def _first_event(self, new: EventStream, old_is_open: bool) -> pb.AttendResponse | None:
        """The first event of the new stream. None if the new connection is refused and the old one still works."""
        try:
            if (first := await new.next()) is not None:
                return first
            raise errors.Unreachable("the coordinator ended the stream")
        except (errors.Unreachable, errors.NotAllowed) as error:
            if not old_is_open:
                raise
            todo = "the earlier connection is kept; does the coordinator know the CA of the new certificate?"
            log.warning("not_moved", server=self._endpoint.server, reason=str(error), todo=todo)
            return None

    async def _take_last_events(self, old: EventStream) -> None:
        """The coordinator has ended the old stream. Its events come before those of the new one."""
        with suppress(errors.TransportError, TimeoutError):
            async with asyncio.timeout(LAST_EVENTS_S):
                while (event := await old.next()) is not None:
                    self._take(event, old)

    async def _take_until(self, stream: EventStream, other: asyncio.Future[Any]) -> bool:
        """Take events until `other` is done. Returns False if the stream ended before."""
        while True:
            await asyncio.wait({stream.next_event, other}, return_when=asyncio.FIRST_COMPLETED)
            if not stream.next_event.done():
                return True
            if (event := stream.take()) is None:
                return False
            self._take(event, stream)

    def _take(self, event: pb.AttendResponse, stream: EventStream) -> None:
        kind = event.WhichOneof("event")
        if not stream.attached:
            if kind != "attached":
                raise errors.Unreachable(f"expected Attached as the first event, got {kind or 'an unknown one'}")
            stream.attached = True
            self._reconnect.attached()
            self._link.open(stream.session)
            self._handler.attached()
            return
        match kind:
            case "attached":
                pass  # a repeat
            case "retry":
                self._wait, self._reason = seconds_of(event.retry.wait), log_text(event.retry.reason)
            case "drain":
                self._reason = log_text(event.drain.reason) or "drained"
                log.info("drained", by_coordinator=event.drain.coordinator_leaving, reason=self._reason)
            case "notice":
                if self._notices.try_acquire():
                    log.warning("notice", text=log_text(event.notice.text))
            case _:
                self._handler.handle(event)

    async def _register(self, connection: GrpcTransport) -> pb.AttendRequest:
        """Open a session. Returns what its first stream has to ask."""
        request, asked = self._endpoint.registration(), await self._asked()
        request.pending.extend(asked.pending)
        request.states.extend(asked.states)
        response = await connection.register(request)
        check_registration(response, request)
        self._endpoint.accept(response)
        coordinator = log_text(response.coordinator_id)
        log.info("registered", client=request.client_id, protocol=response.protocol, coordinator=coordinator)
        if clocks := clocks_differ(response.time, time.time()):
            log.warning("clocks_differ", reason=f"{clocks}: set the wrong one, for example by timedatectl set-ntp true")
        for event in requested_events(response, request):
            self._handler.handle(event)
        self._session = response
        return unanswered(response, request)
