"""One process full of clients that attend and wait: the daemons' own code for staying connected, and no training.

Each has an identity, a session and a TCP connection of its own, and comes back as a daemon does. What they live
through goes to the parent through a pipe: how many are attached, and when each assignment came.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

import structlog

from fl_client.attendance import Attendance, Door
from fl_client.link import Link, Waits
from fl_client.transport import GrpcTransport
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2
from protos.pem import Pem
from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN

START_SPREAD_S = 10.0
"""Clients of one process begin within this time: devices are not switched on in one moment."""


@dataclass(frozen=True)
class Crowd:
    """Who is in one process."""

    server: str
    names: tuple[str, ...]
    offer: bytes
    """A TaskOffer that runs ask for, serialized."""
    tls: dict[str, Pem]
    """By name; empty for plain text."""


class _Desk:
    """Takes what is pushed and does none of it."""

    def __init__(self, seen: _Seen) -> None:
        self._seen = seen
        self._here = False

    def attached(self) -> None:
        self._here = True
        self._seen.attached += 1
        self._seen.arrivals += 1

    def disconnected(self) -> None:
        self._seen.attached -= self._here
        self._here = False

    def take(self, event: pb.AttendResponse) -> None:
        if event.WhichOneof("event") == "assignment":
            self._seen.assignments.append(time.time())

    async def ready(self) -> None:
        """Nothing is waited for."""

    async def pending(self) -> list[training_pb2.ExchangeKey]:
        return []

    async def states(self) -> list[pb.HeldState]:
        return []


@dataclass
class _Seen:
    attached: int
    arrivals: int
    assignments: list[float]


def live(pipe: Pipe, crowd: Crowd) -> None:
    """Attend until the parent's end closes; answers each message with (attached, arrivals, assignment times)."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    asyncio.run(_live(pipe, crowd))


async def _live(pipe: Pipe, crowd: Crowd) -> None:
    seen, loop = _Seen(0, 0, []), asyncio.get_running_loop()
    over = asyncio.Event()

    def answer() -> None:
        try:
            pipe.recv()
            pipe.send((seen.attached, seen.arrivals, list(seen.assignments)))
        except (EOFError, OSError):
            over.set()

    loop.add_reader(pipe.fileno(), answer)
    tasks = [
        asyncio.create_task(_client(crowd, name, index * START_SPREAD_S / len(crowd.names), seen))
        for index, name in enumerate(crowd.names)
    ]
    await over.wait()
    loop.remove_reader(pipe.fileno())
    for task in tasks:
        task.cancel()


async def _client(crowd: Crowd, name: str, delay: float, seen: _Seen) -> None:
    await asyncio.sleep(delay)
    hello = pb.RegisterRequest(
        client_id=name,
        instance_id=name,
        protocol=pb.ProtocolRange(min=PROTOCOL_MIN, max=PROTOCOL_MAX),
        tasks=[pb.TaskOffer.FromString(crowd.offer)],
    )
    door = Door(crowd.server, lambda: GrpcTransport(crowd.server, crowd.tls.get(name)))
    attendance = Attendance(lambda: pb.RegisterRequest.FromString(hello.SerializeToString()), door, Link(Waits()))
    await attendance.keep(_Desk(seen))  # type: ignore[arg-type] # all that Attendance asks of a desk
