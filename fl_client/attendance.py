"""Staying connected: register, attend, and come back for ever with growing waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import structlog

from fl_client.desk import Desk
from fl_client.errors import (
    ClientError,
    Fenced,
    NotAllowed,
    ProtocolMismatch,
    Refused,
    SessionLost,
    StartError,
    TransportError,
)
from fl_client.link import Backoff, Link, Session
from fl_client.transport import Connect, Connection
from protos.fl.v1 import coordinator_pb2 as pb
from protos.wire import CHUNK_BYTES, MAX_CHUNK_BYTES

log = structlog.get_logger()


class Attendance:
    """Keeps one attended session open, and the link informed of it."""

    def __init__(self, hello: Callable[[], pb.RegisterRequest], server: str, connect: Connect, link: Link) -> None:
        """hello: what this daemon says of itself now."""
        self._hello = hello
        self._server = server
        self._connect = connect
        self._link = link
        self._session: pb.RegisterResponse | None = None

    async def keep(self, desk: Desk) -> None:
        """Attend for ever, handing every event to `desk`.

        Raises:
            Fenced: another daemon uses this identity; going on would be a fight without end.
        """
        backoff = Backoff(self._link.waits)
        while True:
            known = self._session
            try:
                wait, why = await self._attend(desk, backoff)
                wait = backoff.next() if wait is None else wait
            except (SessionLost, Fenced) as error:
                if isinstance(error, Fenced) and error.by_other_instance:
                    raise
                self._session = None
                if known is not None:
                    backoff.reset()  # the coordinator is back and only wants to be told who this is
                wait, why = backoff.next(), str(error)
            except (ProtocolMismatch, NotAllowed, Refused, StartError) as error:
                self._session = None
                wait, why = self._link.waits.blocked, str(error)
                log.error("refused", reason=why, todo=_TODO[type(error)])
            except TransportError as error:
                wait, why = (backoff.next() if error.wait is None else error.wait), str(error)
            log.warning("disconnected", server=self._server, reason=why, next_try_seconds=round(wait, 1))
            desk.disconnected()
            await asyncio.sleep(wait)

    async def _attend(self, desk: Desk, backoff: Backoff) -> tuple[float | None, str]:
        """One connection from beginning to end: the seconds that the coordinator wants before the next, and why."""
        connection = self._connect()
        wait, why = None, "the coordinator ended the stream"
        try:
            session = self._session = self._session or await self._register(connection, desk)
            async with aclosing(connection.attend(session.session_id)) as events:
                async for event in events:
                    match event.WhichOneof("event"):
                        case "attached":
                            backoff.reset()
                            self._link.open(_session_of(session, connection))
                            desk.attached()
                        case "retry":
                            wait, why = event.retry.wait.ToTimedelta().total_seconds(), event.retry.reason
                        case "drain":
                            why = event.drain.reason or "drained"
                            log.info("drained", by_coordinator=event.drain.coordinator_leaving, reason=why)
                        case "notice":
                            log.warning("notice", text=event.notice.text)
                        case _:
                            desk.take(event)
        finally:
            self._link.close()
            await connection.close()
        return wait, why

    async def _register(self, connection: Connection, desk: Desk) -> pb.RegisterResponse:
        request = self._hello()
        request.pending.extend(await desk.pending())
        request.states.extend(await desk.states())
        response = await connection.register(request)
        log.info("registered", client=request.client_id, protocol=response.protocol)
        for outcome in response.outcomes:
            desk.take(pb.AttendResponse(outcome=outcome))
        for run_id in response.ended_runs:
            desk.take(pb.AttendResponse(run_ended=pb.RunEnded(run_id=run_id)))
        return response


def _session_of(response: pb.RegisterResponse, connection: Connection) -> Session:
    """The session with the sizes that both sides keep to; a coordinator that names none gets our own."""
    largest = min(response.limits.max_chunk_bytes or MAX_CHUNK_BYTES, MAX_CHUNK_BYTES)
    best = min(response.limits.chunk_bytes or CHUNK_BYTES, largest)
    return Session(response.session_id, connection, best, largest)


_TODO: dict[type[ClientError], str] = {
    ProtocolMismatch: "upgrade the older side; this daemon tries again meanwhile",
    NotAllowed: "ask the coordinator's operator: the identity is banned, or the certificate is not for it",
    StartError: "put the file back; this daemon tries again meanwhile",
    Refused: "compare this daemon's configuration and version with the coordinator's",
}
