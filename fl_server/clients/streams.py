"""The Attend streams: the messages that are pushed to each client."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fl_server.clients.attendance import Attendance
from fl_server.clients.sessions import Session, Sessions, Stream
from fl_server.clients.transfer_limits import Excess, TransferLimits
from fl_server.errors import UnknownSessionError
from protos.fl.v1 import coordinator_pb2 as pb


class Streams:
    """The Attend streams of all clients. Lives on the event loop."""

    def __init__(self, sessions: Sessions, attendance: Attendance, limits: TransferLimits, most_waiting: int) -> None:
        """most_waiting: a client that reads nothing while more messages wait loses its stream."""
        self._sessions, self._attendance = sessions, attendance
        self._limits, self._most_waiting = limits, most_waiting

    async def attend(self, session_id: str) -> AsyncIterator[pb.AttendResponse]:
        """Yields the messages pushed to the client. It is present for as long as this is read.

        Raises UnknownSessionError, Forbidden, StoreError.
        """
        session = self._sessions.of_call(session_id)
        if session.stream is not None:
            session.stream.end()
        stream = session.stream = Stream()
        stream.push(pb.AttendResponse(attached=pb.Attached()))
        client_id = session.client_id
        try:
            await self._attendance.begun(client_id)
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

    def push_all(self, message: pb.AttendResponse) -> None:
        """Push a message to every attached client."""
        self._sessions.push_all(message)

    def _grant_calls(self, client_id: str, message: pb.AttendResponse) -> None:
        """New work grants the calls that it needs."""
        if message.HasField("assignment"):
            key, attempt = message.assignment.key, message.assignment.attempt
            self._limits.assigned(client_id, (key.run_id, key.round, key.exchange, attempt))
        elif message.HasField("evaluation"):
            self._limits.assigned(client_id, (message.evaluation.key.run_id, message.evaluation.key.round))

    def _drop_unread(self, session: Session, stream: Stream) -> None:
        """End the stream of a client that reads nothing. It registers again and is sent its outstanding work."""
        client_id = session.client_id
        excess = Excess("messages", f"{self._most_waiting} messages waiting (transfers.messages_waiting)", 0.0)
        self._limits.exceeded(client_id, excess)
        stream.drop(UnknownSessionError())
        session.stream = None
        self._sessions.close(client_id, UnknownSessionError())
        self._attendance.stream_lost(client_id)
