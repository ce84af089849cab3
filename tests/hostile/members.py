"""A member of a run's cohort that does its work correctly except for one false value."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import torch

from protos.codec import Layout, pack, unpack
from protos.digests import digest_message, digest_of
from protos.fl.v1.coordinator_pb2 import AttendResponse
from protos.fl.v1.training_pb2 import (
    PAYLOAD_KIND_DELTA,
    Assignment,
    Payload,
    PayloadKind,
    Receipt,
    UpdateHeader,
    UpdateTrailer,
)
from tests.hostile.federation import Federation
from tests.processes.process import TIMEOUT_S
from tests.processes.raw_client import RawClient, Tensors, Update

Lie = Callable[[UpdateHeader, dict[PayloadKind, Tensors]], None]
"""Changes the header, or the tensors by the kind of their payload."""
LENGTH = 0.01
"""Value of every entry of a proper update, close to the honest daemons' values."""


@dataclass
class Member:
    """The member's results."""

    receipts: list[Receipt] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)


@contextmanager
def member(federation: Federation, name: str, lie: Lie) -> Iterator[Member]:
    """Attend during the block, also after restarts of the coordinator, and send a false update in every round."""
    came, over, became = threading.Event(), threading.Event(), Member()
    held: list[RawClient] = []

    def attend() -> None:
        while not over.is_set():
            try:
                with federation.raw(name) as client:
                    held[:] = [client]
                    client.register()
                    for event in _events(client, came):
                        if event.HasField("assignment"):
                            became.receipts.append(client.submit(lied(client, event.assignment, lie)))
            except (grpc.RpcError, ValueError) as error:  # a closed channel raises ValueError
                became.failures.append(error)
                time.sleep(0.05)

    thread = threading.Thread(target=attend, daemon=True)
    thread.start()
    assert came.wait(TIMEOUT_S), f"{name} did not come: {became.failures}"
    try:
        yield became
    finally:
        over.set()
        for client in held:
            client.__exit__()
        thread.join(TIMEOUT_S)
        with federation.server.admin() as admin:
            admin.clients.forget_client(name)  # otherwise a restarted coordinator waits for it
    assert not thread.is_alive()


def _events(client: RawClient, came: threading.Event) -> Iterator[AttendResponse]:
    events = client.attend()
    came.set()
    return events


def lied(client: RawClient, assignment: Assignment, lie: Lie) -> Update:
    """The false update for an assignment."""
    layout, data = client.fetch(assignment.resources[0])
    sent = unpack(data, layout)
    trainable = [entry.name for entry in layout.entries if entry.trainable]
    payloads: dict[PayloadKind, Tensors] = {}
    for kind in assignment.payloads:
        names = list(sent) if kind == PAYLOAD_KIND_DELTA else trainable
        payloads[kind] = {
            name: torch.full_like(sent[name], LENGTH) if name in trainable else sent[name].clone() for name in names
        }
    header = UpdateHeader(
        session_id=client.session_id,
        key=assignment.key,
        attempt=assignment.attempt,
        num_examples=10,
        num_steps=1,
        state_epoch=assignment.state_epoch,
    )
    lie(header, payloads)
    layouts = {kind: Layout.of(tensors, trainable) for kind, tensors in payloads.items()}
    data = b"".join(bytes(pack(tensors, layouts[kind])) for kind, tensors in payloads.items())
    header.payloads.extend(Payload(kind=kind, manifest=each.to_manifest()) for kind, each in layouts.items())
    header.size_bytes = len(data)
    header.digest.CopyFrom(digest_message(digest_of(data)))
    return Update(header, data, UpdateTrailer(size_bytes=len(data)))
