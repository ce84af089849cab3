"""A client that joins the run and sends an invalid update, which is refused with the right reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Queue
from random import Random
from threading import Thread
from typing import TYPE_CHECKING

import grpc
import torch

from protos.codec import unpack
from protos.digests import digest_message, digest_of
from protos.fl.v1 import admin_pb2, errors_pb2, training_pb2
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import RefusalReason
from tests.chaos.fault import DidNotHappen, Fault
from tests.processes.process import TIMEOUT_S, eventually
from tests.processes.raw_client import RawClient, Tensors, Update, detail

if TYPE_CHECKING:
    from tests.chaos.cluster import ChaosCluster

ROGUE = "raw-rogue"
CHUNK_BYTES = 64 << 10
TensorChange = Callable[[Tensors], Tensors]
HeaderChange = Callable[[training_pb2.UpdateHeader], None]


@dataclass(frozen=True)
class InvalidKind:
    """One kind of invalid update: wrong tensors in a well-formed update, or a wrong header."""

    reason: str
    """The expected reason: the end of a RefusalReason's name."""
    change_tensors: TensorChange = lambda tensors: tensors
    change_header: HeaderChange = lambda header: None


@dataclass(frozen=True)
class InvalidUpdate:
    """A further device registers, is drawn for a round, and sends an invalid update."""

    kind: str
    may_lose_update = True

    @property
    def name(self) -> str:
        return f"update with {self.kind}"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        bad = KINDS[self.kind]
        if bad.reason == "NORM" and not cluster.server.run(run_id).spec.round.max_update_norm:
            raise DidNotHappen("the run has no limit of norms, so a huge update is valid")
        with rogue(cluster, run_id) as (client, assignment):
            receipt = answer(client, invalid_update(client, assignment, bad))
        came = RefusalReason.Name(receipt.reason).removeprefix("REFUSAL_REASON_")
        if came == "LATE":
            raise DidNotHappen(f"the round was closed before: {receipt.detail}")
        assert not receipt.admitted, f"an {self.name} was admitted"
        assert came == bad.reason, f"an {self.name} was refused for {came}, not for {bad.reason}: {receipt.detail}"


@contextmanager
def rogue(cluster: ChaosCluster, run_id: str) -> Iterator[tuple[RawClient, training_pb2.Assignment]]:
    """A client that is drawn for the run and forgotten afterwards. Raises DidNotHappen if it is never drawn."""
    with RawClient(cluster.server.address, ROGUE) as client, cluster.server.admin() as admin:
        client.register()
        given: Queue[training_pb2.Assignment] = Queue()
        reader = Thread(target=_listen, args=(client.attend(), run_id, given), name="rogue")
        reader.start()
        try:
            eventually(lambda: given.qsize() or cluster.over(), "the rogue is drawn, or the run is over")
            if not given.qsize():
                raise DidNotHappen("it was not drawn before the run was over")
            admin.call(
                admin_pb2.DrainClientRequest(client_id=ROGUE, reason="the update was sent"),
                admin_pb2.DrainClientResponse,
            )
            yield client, given.get()
        finally:
            admin.clients.forget_client(ROGUE)
            client.__exit__()
            reader.join(TIMEOUT_S)


def _listen(events: Iterator[pb.AttendResponse], run_id: str, given: Queue[training_pb2.Assignment]) -> None:
    """Pass on the assignments of the run until the session ends."""
    with suppress(grpc.RpcError):
        for event in events:
            if event.assignment.key.run_id == run_id:
                given.put(event.assignment)


def invalid_update(client: RawClient, assignment: training_pb2.Assignment, bad: InvalidKind) -> Update:
    """The invalid update for an assignment."""
    layout, data = client.fetch(assignment.resources[0])
    good = {name: torch.full_like(value, 1e-3) for name, value in unpack(data, layout).items()}
    update = client.update_of(assignment, bad.change_tensors(good))
    bad.change_header(update.header)
    return update


def answer(client: RawClient, update: Update) -> training_pb2.Receipt:
    """The receipt of an update. After a wrong digest the bytes are sent a second time."""
    try:
        return client.submit(update, CHUNK_BYTES)
    except grpc.RpcError as error:
        if not isinstance(detail(error), errors_pb2.BrokenUpload):
            raise
        return client.submit(update, CHUNK_BYTES)


def poisoned(value: float, tensors: Tensors) -> Tensors:
    """Replace one number of the last tensor."""
    tensors[list(tensors)[-1]].view(-1)[-1] = value
    return tensors


def huge(tensors: Tensors) -> Tensors:
    """Tensors of the largest finite numbers."""
    return {name: torch.full_like(value, torch.finfo(value.dtype).max) for name, value in tensors.items()}


def reshaped(tensors: Tensors) -> Tensors:
    """Tensors with the first one transposed."""
    first, *rest = tensors
    return {first: tensors[first].T.contiguous(), **{name: tensors[name] for name in rest}}


def doubled(tensors: Tensors) -> Tensors:
    """Tensors in float64."""
    return {name: value.double() for name, value in tensors.items()}


def renamed(tensors: Tensors) -> Tensors:
    """Tensors with another name for the first one."""
    first, *rest = tensors
    return {f"{first}s": tensors[first], **{name: tensors[name] for name in rest}}


def _set(**fields: int) -> HeaderChange:
    def change_header(header: training_pb2.UpdateHeader) -> None:
        for name, value in fields.items():
            setattr(header, name, value)

    return change_header


def _another_digest(header: training_pb2.UpdateHeader) -> None:
    header.digest.CopyFrom(digest_message(digest_of(b"something else")))


def _another_kind(header: training_pb2.UpdateHeader) -> None:
    header.payloads[0].kind = training_pb2.PAYLOAD_KIND_FULL_GRADIENT


KINDS: Mapping[str, InvalidKind] = {
    "a NaN": InvalidKind("NOT_FINITE", partial(poisoned, math.nan)),
    "an infinity": InvalidKind("NOT_FINITE", partial(poisoned, -math.inf)),
    "huge numbers": InvalidKind("NORM", huge),
    "another shape": InvalidKind("LAYOUT", reshaped),
    "another dtype": InvalidKind("LAYOUT", doubled),
    "another name": InvalidKind("LAYOUT", renamed),
    "one tensor more": InvalidKind("LAYOUT", lambda tensors: {**tensors, "one.more": torch.ones(2)}),
    "one tensor less": InvalidKind("LAYOUT", lambda tensors: dict(list(tensors.items())[:-1])),
    "no tensor": InvalidKind("LAYOUT", lambda tensors: {}),
    "no payload": InvalidKind("LAYOUT", change_header=lambda header: header.ClearField("payloads")),
    "another kind of payload": InvalidKind("LAYOUT", change_header=_another_kind),
    "another size": InvalidKind("SIZE", change_header=_set(size_bytes=40)),
    "an impossible size": InvalidKind("SIZE", change_header=_set(size_bytes=1 << 60)),
    "another digest": InvalidKind("DIGEST", change_header=_another_digest),
    "no digest": InvalidKind("DIGEST", change_header=lambda header: header.ClearField("digest")),
    "no examples": InvalidKind("HEADER", change_header=_set(num_examples=0)),
    "another state epoch": InvalidKind("STATE_EPOCH", change_header=_set(state_epoch=1 << 40)),
}


def _bad(kind: str, draw: Random) -> Fault:
    return InvalidUpdate(kind)


FAULTS: dict[str, Callable[[Random], Fault]] = {InvalidUpdate(kind).name: partial(_bad, kind) for kind in KINDS}
