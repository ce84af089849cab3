"""A session: the checks of its registration, and its events, requested one at a time."""

from __future__ import annotations

import asyncio
from typing import Protocol

from fl_client.connection.link import Session
from fl_client.connection.transport import GrpcTransport
from fl_client.errors import ProtocolMismatch, SessionLost, Unreachable
from fl_common.certificates.pem import Pem
from fl_common.proxies import proxy_for
from fl_common.rate_limits import RateLimiter
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2
from protos.wire import CHUNK_BYTES, MAX_CHUNK_BYTES

MIN_CHUNK_BYTES = 16 << 10
"""A lower limit on chunks is ignored: a model would need millions of them."""
_SESSION_CHARS = 256
_ADDRESS_CHARS = 300


def check_registration(response: pb.RegisterResponse, request: pb.RegisterRequest) -> None:
    """Check version and session id.

    Raises:
        ProtocolMismatch: the version was not offered.
        Unreachable: the session id is empty or too long.
    """
    offered = request.protocol
    if not offered.min <= response.protocol <= offered.max:
        raise ProtocolMismatch(
            f"expected protocol {offered.min} to {offered.max}, got {response.protocol}",
            (response.protocol, response.protocol),
        )
    if not 1 <= len(response.session_id) <= _SESSION_CHARS:
        raise Unreachable(f"expected a session id of 1 to {_SESSION_CHARS} characters, got {len(response.session_id)}")


def session_of(response: pb.RegisterResponse, connection: GrpcTransport) -> Session:
    """The session, with chunk sizes within both sides' limits. Missing sizes get this side's defaults.

    Model bytes go where the coordinator says.
    """
    largest = max(min(response.limits.max_chunk_bytes or MAX_CHUNK_BYTES, MAX_CHUNK_BYTES), MIN_CHUNK_BYTES)
    preferred = min(response.limits.chunk_bytes or CHUNK_BYTES, largest)
    connection.move_data_to(response.data_address[:_ADDRESS_CHARS])
    return Session(response.session_id, connection, preferred, largest)


def requested_events(response: pb.RegisterResponse, request: pb.RegisterRequest) -> list[pb.AttendResponse]:
    """The outcomes and ended runs that the request asked about, as events. Others are ignored."""
    pending = {_name(key) for key in request.pending}
    runs = {state.run_id for state in request.states}
    events: list[pb.AttendResponse] = []
    for outcome in response.outcomes:
        if (name := _name(outcome.key)) in pending:
            pending.remove(name)
            events.append(pb.AttendResponse(outcome=outcome))
    for run_id in response.ended_runs:
        if run_id in runs:
            runs.remove(run_id)
            events.append(pb.AttendResponse(run_ended=pb.RunEnded(run_id=run_id)))
    return events


def unanswered(response: pb.RegisterResponse, request: pb.RegisterRequest) -> pb.AttendRequest:
    """What the registration has asked and does not know yet. It may be decided before the first stream is open."""
    decided = {_name(outcome.key) for outcome in response.outcomes}
    return pb.AttendRequest(
        pending=[key for key in request.pending if _name(key) not in decided],
        states=[state for state in request.states if state.run_id not in response.ended_runs],
    )


def _name(key: training_pb2.ExchangeKey) -> bytes:
    return key.SerializeToString(deterministic=True)


async def ask(server: str, client_id: str, tls: Pem | None, *, proxy: str) -> None:
    """Register with a protocol version that does not exist.

    A coordinator checks certificate and name first, and then refuses with its supported versions. No session is opened,
    so a running daemon of the same identity is not fenced.

    Raises:
        ProtocolMismatch: the device is accepted.
        Revoked: its certificate is revoked.
        NotAllowed: it is not accepted for another reason.
        TransportError: there is no answer.
    """
    transport = GrpcTransport(server, tls, proxy=proxy_for(server, proxy))
    try:
        await transport.register(pb.RegisterRequest(client_id=client_id, protocol=pb.ProtocolRange()))
    finally:
        await transport.close()


FIRST_EVENT_S = 60.0
"""Longest wait for the first event of a stream."""


class EventHandler(Protocol):
    """Takes the events of a session, and knows what a call has to ask."""

    def attached(self) -> None:
        """The coordinator's stream is open."""
        ...

    def disconnected(self, *, refused: bool) -> None:
        """The stream is closed. refused: the coordinator refuses this device."""
        ...

    def handle(self, event: pb.AttendResponse) -> None:
        """Act on one event."""
        ...

    async def ready(self) -> None:
        """Wait until the next event can be handled."""
        ...

    async def pending_updates(self) -> list[training_pb2.ExchangeKey]:
        """Keys of the updates with an unknown outcome."""
        ...

    async def client_states(self) -> list[pb.HeldState]:
        """The runs with a client state."""
        ...


class EventStream:
    """An Attend stream and its connection.

    Events are requested at a limited rate, and only while the handler is ready; else the coordinator's send blocks.
    """

    def __init__(self, session: Session, handler: EventHandler, rate: RateLimiter, asked: pb.AttendRequest) -> None:
        """asked: the updates and runs that the device does not know the end of. What was sent of them may be lost."""
        self.session, self._handler, self._rate = session, handler, rate
        self.attached = False
        """Whether its first event has been taken."""
        self._events = session.connection.attend(session.id, asked)
        self._next_event: asyncio.Task[pb.AttendResponse | None] | None = None

    @property
    def next_event(self) -> asyncio.Task[pb.AttendResponse | None]:
        """The next event, the same until it is taken. None when the coordinator has ended the stream."""
        if self._next_event is None:
            self._next_event = asyncio.create_task(self._request())
        return self._next_event

    def take(self) -> pb.AttendResponse | None:
        """Take the event that has arrived. Raises the TransportError that arrived instead."""
        arrived, self._next_event = self.next_event, None
        return arrived.result()

    async def next(self) -> pb.AttendResponse | None:
        """Wait for the next event, and take it."""
        await asyncio.wait({self.next_event})
        return self.take()

    async def wait_for_first(self) -> None:
        """Wait for the first event without taking it. Raises Unreachable when it does not arrive in time."""
        done, _ = await asyncio.wait({self.next_event}, timeout=FIRST_EVENT_S)
        if not done:
            raise Unreachable(f"expected the coordinator's first event within {FIRST_EVENT_S:g} s, got none")

    async def session_is_lost(self) -> bool:
        """Whether the coordinator's first answer is that it does not know the session. No event is taken."""
        await self.wait_for_first()
        return isinstance(self.next_event.exception(), SessionLost)

    async def close_after_calls(self) -> None:
        """Close stream and connection when the calls in progress have finished."""
        try:
            await self.session.calls.finished()
        finally:
            await self.close()

    async def close(self) -> None:
        """Close stream and connection now. Calls in progress fail."""
        if self._next_event is not None:
            self._next_event.cancel()
            await asyncio.gather(self._next_event, return_exceptions=True)
        await self._events.aclose()
        await self.session.connection.close()

    async def _request(self) -> pb.AttendResponse | None:
        if delay := self._rate.delay():
            await asyncio.sleep(delay)
        await self._handler.ready()
        return await anext(self._events, None)
