"""An attacker that registers and gets its own work, so that its calls pass the same checks as an honest client's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import grpc.aio

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2
from protos.wire import client_options
from tests.hostile.federation import Federation
from tests.hostile.target import Target, Until
from tests.processes.certificates import credentials
from tests.processes.raw_client import RawClient

OPTIONS = (
    *client_options(),
    # The window of a stream does not grow, so unread data stays at the coordinator.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65_535),
)
LOOKS_EVERY_S = 0.5
"""Interval at which an attacker without work looks whether its time is over."""


def begin_run_of(federation: Federation, name: str, model: str = "frozen") -> str:
    """Create a run with the attacker as its only client; it stays in its first round until an update is delivered."""
    return federation.server.create(
        f"run-of-{name}",
        labels={"site": name},
        task={"name": "tiny_task:Tiny", "options": {"model": model}},
        round={"clients_per_round": 1, "min_clients": 1},
    )


@contextmanager
def assigned(target: Target, until: Until) -> Iterator[tuple[RawClient, training_pb2.Assignment]]:
    """Register and attend as the attacker; returns its work. Raises AssertionError if none comes before the end."""
    with RawClient(target.listen, target.name, credentials(target.certificates)) as client:
        client.register(labels={"site": target.name})
        events = client.stub.Attend(pb.AttendRequest(session_id=client.session_id))
        works: queue.Queue[training_pb2.Assignment] = queue.Queue()
        thread = threading.Thread(target=_take, args=(events, works), daemon=True)
        thread.start()
        try:
            yield client, _first(works, until)
        finally:
            events.cancel()
            thread.join()


def _first(works: queue.Queue[training_pb2.Assignment], until: Until) -> training_pb2.Assignment:
    while not until():
        with suppress(queue.Empty):
            return works.get(timeout=LOOKS_EVERY_S)
    raise AssertionError("the attacker got no work, so it attacked nothing")


def _take(events: Iterator[Any], works: queue.Queue[training_pb2.Assignment]) -> None:
    with suppress(grpc.RpcError):
        for event in events:
            if event.HasField("assignment"):
                works.put(event.assignment)


@contextmanager
def refusals() -> Iterator[None]:
    """Ignore all refusals of the coordinator."""
    with suppress(grpc.RpcError, grpc.aio.AioRpcError):
        yield


def channels(target: Target, count: int) -> Sequence[grpc.aio.Channel]:
    """Open this many connections with the attacker's certificate."""
    who = credentials(target.certificates)
    return [grpc.aio.secure_channel(target.listen, who, list(OPTIONS)) for _ in range(count)]
