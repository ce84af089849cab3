"""A client that takes part in the run as one more device, and answers with nonsense: refused, with the right reason."""

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
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2, training_pb2
from protos.fl.v1.training_pb2 import RefusalReason
from protos.status import detail_of
from tests.chaos.fault import DidNotHappen, Fault
from tests.integration.processes import PATIENCE_S, eventually
from tests.integration.raw_client import RawClient, Tensors, Update

if TYPE_CHECKING:
    from tests.chaos.arena import Arena

ROGUE = "raw-rogue"
CHUNK_BYTES = 64 << 10
Spoil = Callable[[Tensors], Tensors]
Twist = Callable[[training_pb2.UpdateHeader], None]


@dataclass(frozen=True)
class Bad:
    """One kind of nonsense: wrong tensors in an update that is else well formed, or a header that does not fit."""

    reason: str
    """Why it is refused: the end of a RefusalReason's name."""
    spoil: Spoil = lambda tensors: tensors
    twist: Twist = lambda header: None


@dataclass(frozen=True)
class BadUpdate:
    """One more device registers, is drawn some time, and sends what it sends."""

    kind: str
    takes_away = True

    @property
    def name(self) -> str:
        return f"update with {self.kind}"

    def inject(self, arena: Arena, run_id: str) -> None:
        bad = KINDS[self.kind]
        if bad.reason == "NORM" and not arena.server.run(run_id).spec.round.max_update_norm:
            raise DidNotHappen("the run has no limit of norms: a huge update is one like any other")
        with rogue(arena, run_id) as (client, assignment):
            receipt = answer(client, made(client, assignment, bad))
        came = RefusalReason.Name(receipt.reason).removeprefix("REFUSAL_REASON_")
        if came == "LATE":
            raise DidNotHappen(f"the round was closed before: {receipt.detail}")
        assert not receipt.admitted, f"an {self.name} was admitted"
        assert came == bad.reason, f"an {self.name} was refused for {came}, not for {bad.reason}: {receipt.detail}"


@contextmanager
def rogue(arena: Arena, run_id: str) -> Iterator[tuple[RawClient, training_pb2.Assignment]]:
    """A client with work of the run; nobody knows it afterwards. Raises DidNotHappen when it is never drawn."""
    with RawClient(arena.server.address, ROGUE) as client, arena.server.admin() as admin:
        client.register()
        given: Queue[training_pb2.Assignment] = Queue()
        reader = Thread(target=_listen, args=(client.attend(), run_id, given), name="rogue")
        reader.start()
        try:
            eventually(lambda: given.qsize() or arena.over(), "the rogue is drawn, or the run is over")
            if not given.qsize():
                raise DidNotHappen("it was not drawn before the run was over")
            admin.drain_client(ROGUE, "it has done enough", undo=False)
            yield client, given.get()
        finally:
            admin.forget_client(ROGUE)
            client.__exit__()
            reader.join(PATIENCE_S)


def _listen(events: Iterator[pb.AttendResponse], run_id: str, given: Queue[training_pb2.Assignment]) -> None:
    """Hand on what is assigned until the session ends."""
    with suppress(grpc.RpcError):
        for event in events:
            if event.assignment.key.run_id == run_id:
                given.put(event.assignment)


def made(client: RawClient, assignment: training_pb2.Assignment, bad: Bad) -> Update:
    """The nonsense, in answer to an assignment."""
    layout, data = client.fetch(assignment.resources[0])
    good = {name: torch.full_like(value, 1e-3) for name, value in unpack(data, layout).items()}
    update = client.update_of(assignment, bad.spoil(good))
    bad.twist(update.header)
    return update


def answer(client: RawClient, update: Update) -> training_pb2.Receipt:
    """The word on an update; bytes that are not what was announced may be sent once more."""
    try:
        return client.submit(update, CHUNK_BYTES)
    except grpc.RpcError as error:
        if not isinstance(detail_of(error.trailing_metadata()), errors_pb2.BrokenUpload):
            raise
        return client.submit(update, CHUNK_BYTES)


def poisoned(value: float, tensors: Tensors) -> Tensors:
    """One number of the last tensor is this one."""
    tensors[list(tensors)[-1]].view(-1)[-1] = value
    return tensors


def huge(tensors: Tensors) -> Tensors:
    """The largest numbers that are finite."""
    return {name: torch.full_like(value, torch.finfo(value.dtype).max) for name, value in tensors.items()}


def reshaped(tensors: Tensors) -> Tensors:
    """Of the same size, transposed."""
    first, *rest = tensors
    return {first: tensors[first].T.contiguous(), **{name: tensors[name] for name in rest}}


def doubled(tensors: Tensors) -> Tensors:
    """In float64."""
    return {name: value.double() for name, value in tensors.items()}


def renamed(tensors: Tensors) -> Tensors:
    """The first has another name."""
    first, *rest = tensors
    return {f"{first}s": tensors[first], **{name: tensors[name] for name in rest}}


def _set(**fields: int) -> Twist:
    def twist(header: training_pb2.UpdateHeader) -> None:
        for name, value in fields.items():
            setattr(header, name, value)

    return twist


def _another_digest(header: training_pb2.UpdateHeader) -> None:
    header.digest.CopyFrom(digest_message(digest_of(b"something else")))


def _another_kind(header: training_pb2.UpdateHeader) -> None:
    header.payloads[0].kind = training_pb2.PAYLOAD_KIND_FULL_GRADIENT


KINDS: Mapping[str, Bad] = {
    "a NaN": Bad("NOT_FINITE", partial(poisoned, math.nan)),
    "an infinity": Bad("NOT_FINITE", partial(poisoned, -math.inf)),
    "huge numbers": Bad("NORM", huge),
    "another shape": Bad("LAYOUT", reshaped),
    "another dtype": Bad("LAYOUT", doubled),
    "another name": Bad("LAYOUT", renamed),
    "one tensor more": Bad("LAYOUT", lambda tensors: {**tensors, "one.more": torch.ones(2)}),
    "one tensor less": Bad("LAYOUT", lambda tensors: dict(list(tensors.items())[:-1])),
    "no tensor": Bad("LAYOUT", lambda tensors: {}),
    "no payload": Bad("LAYOUT", twist=lambda header: header.ClearField("payloads")),
    "another kind of payload": Bad("LAYOUT", twist=_another_kind),
    "another size": Bad("SIZE", twist=_set(size_bytes=40)),
    "an impossible size": Bad("SIZE", twist=_set(size_bytes=1 << 60)),
    "another digest": Bad("DIGEST", twist=_another_digest),
    "no digest": Bad("DIGEST", twist=lambda header: header.ClearField("digest")),
    "no examples": Bad("HEADER", twist=_set(num_examples=0)),
    "another state epoch": Bad("STATE_EPOCH", twist=_set(state_epoch=1 << 40)),
}


def _bad(kind: str, draw: Random) -> Fault:
    return BadUpdate(kind)


FAULTS: dict[str, Callable[[Random], Fault]] = {BadUpdate(kind).name: partial(_bad, kind) for kind in KINDS}
