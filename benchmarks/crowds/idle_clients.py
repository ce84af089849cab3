"""Many idle clients in one process: the daemons' code for connections, without training.

`benchmarks.fleet` uses this module. Each client has its own identity, session and TCP connection, and reconnects as a
daemon does. The parent asks through a pipe how many are attached and when each assignment arrived.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

import structlog

from fl_client.connection.link import Link, RetryDelays
from fl_client.connection.reconnect import Endpoint
from fl_client.connection.session_manager import SessionManager
from fl_client.connection.transport import GrpcTransport
from fl_common.certificates.pem import Pem
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2
from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN

START_SPREAD_S = 10.0
"""The clients of one process connect within this time, as devices are not switched on at the same moment."""


@dataclass(frozen=True)
class Crowd:
    """The clients of one process."""

    server: str
    names: tuple[str, ...]
    offer: bytes
    """The TaskOffer of every client, serialized."""
    tls: dict[str, Pem]
    """Certificates by client name; empty for plain text."""


class _IdleAssignments:
    """Counts connections and assignments, and does no work."""

    def __init__(self, counts: _Counts) -> None:
        self._counts = counts
        self._attached = False

    def attached(self) -> None:
        self._attached = True
        self._counts.attached += 1
        self._counts.arrivals += 1

    def disconnected(self, *, refused: bool) -> None:  # noqa: ARG002 - as of the daemon
        self._counts.attached -= self._attached
        self._attached = False

    def handle(self, event: pb.AttendResponse) -> None:
        if event.WhichOneof("event") == "assignment":
            self._counts.assignments.append(time.time())

    async def ready(self) -> None:
        """Always ready."""

    async def pending_updates(self) -> list[training_pb2.ExchangeKey]:
        return []

    async def client_states(self) -> list[pb.HeldState]:
        return []


class _IdleEndpoint(Endpoint):
    """The coordinator for one client."""

    def __init__(self, crowd: Crowd, name: str) -> None:
        super().__init__(crowd.server)
        self._crowd, self._name = crowd, name

    def connect(self) -> GrpcTransport:
        return GrpcTransport(self.server, self._crowd.tls.get(self._name))

    def registration(self) -> pb.RegisterRequest:
        return pb.RegisterRequest(
            client_id=self._name,
            instance_id=self._name,
            protocol=pb.ProtocolRange(min=PROTOCOL_MIN, max=PROTOCOL_MAX),
            tasks=[pb.TaskOffer.FromString(self._crowd.offer)],
        )


@dataclass
class _Counts:
    attached: int
    arrivals: int
    assignments: list[float]


def live(pipe: Pipe, crowd: Crowd) -> None:
    """Stay attached until the parent closes the pipe. Replies to messages with (attached, arrivals, assignments)."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    asyncio.run(_live(pipe, crowd))


async def _live(pipe: Pipe, crowd: Crowd) -> None:
    counts, loop = _Counts(0, 0, []), asyncio.get_running_loop()
    over = asyncio.Event()

    def reply() -> None:
        try:
            pipe.recv()
            pipe.send((counts.attached, counts.arrivals, list(counts.assignments)))
        except (EOFError, OSError):
            over.set()

    loop.add_reader(pipe.fileno(), reply)
    tasks = [
        asyncio.create_task(_client(crowd, name, index * START_SPREAD_S / len(crowd.names), counts))
        for index, name in enumerate(crowd.names)
    ]
    await over.wait()
    loop.remove_reader(pipe.fileno())
    for task in tasks:
        task.cancel()


async def _client(crowd: Crowd, name: str, delay: float, counts: _Counts) -> None:
    await asyncio.sleep(delay)
    sessions = SessionManager(_IdleEndpoint(crowd, name), Link(RetryDelays()))
    await sessions.run(_IdleAssignments(counts))
