"""Simulated devices: they call a coordinator's service without a network, and a formula stands for training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch

from algorithms.privacy.clipping import clipped
from fl_server.errors import NotNow, UploadBroken
from fl_tasks import fingerprint, load_task
from protos.chunks import chunk_spans, make_chunk
from protos.codec import Layout, digest_message, digest_of, pack, unpack
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2
from protos.fl.v1.training_pb2 import (
    PAYLOAD_KIND_DELTA,
    Assignment,
    EvaluationAssignment,
    ExchangeKey,
    Outcome,
    Payload,
    PayloadKind,
    Receipt,
    TaskFingerprint,
    UpdateHeader,
    UpdateTrailer,
)
from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN
from tests.fl_server.harness import TASK, World, until

Key = tuple[str, int, int]
"""(run, round, exchange)."""
NO_CONTEXT: Any = None
"""The context of a call that comes over no transport."""


@dataclass
class Device:
    """A simulated client. It keeps its state through the coordinator's restarts."""

    name: str
    options: Mapping[str, Any] = field(default_factory=lambda: {"model": "batchnorm"})
    labels: Mapping[str, str] = field(default_factory=dict)
    works: bool = True
    """False: it only receives messages; the test answers them."""
    task: str = TASK
    eval_examples: int = 0
    """Examples of its held-out part. The test reports its evaluations."""
    kept: dict[Key, tuple[bytes, UpdateHeader, bytes]] = field(default_factory=dict)
    """Computed updates: (inputs, header, bytes). See `work_of`."""
    newest: dict[Key, bytes] = field(default_factory=dict)
    """The inputs of the newest assignment of each key."""
    outcomes: dict[Key, Outcome] = field(default_factory=dict)
    states: dict[str, Outcome] = field(default_factory=dict)
    """By run: the outcome of the update from which the device's client state was made."""
    loses_state_in: int | None = None
    """Round before which it loses its client state."""
    receipts: list[Receipt] = field(default_factory=list)
    messages: list[pb.AttendResponse] = field(default_factory=list)
    session: str = ""
    process: str = ""
    """Which start of the daemon it is."""
    stream: asyncio.Task[Any] = field(init=False)

    def registration(self, **changes: Any) -> pb.RegisterRequest:
        """Its request to register, with changed fields."""
        version, source = fingerprint(load_task(self.task, self.options))
        offer = pb.TaskOffer(
            name=self.task,
            fingerprint=TaskFingerprint(version=version, source=source),
            train_examples=10 + len(self.name),
            eval_examples=self.eval_examples,
        )
        values: dict[str, Any] = {
            "client_id": self.name,
            "instance_id": f"{self.process} start of {self.name}".strip(),
            "protocol": pb.ProtocolRange(min=PROTOCOL_MIN, max=PROTOCOL_MAX),
            "labels": self.labels,
            "tasks": [offer],
            "pending": self._pending(),
        }
        return pb.RegisterRequest(**{**values, **changes})

    def _pending(self) -> list[ExchangeKey]:
        keys = sorted(self.kept.keys() - self.outcomes.keys())
        return [ExchangeKey(run_id=run, round=round_, exchange=exchange) for run, round_, exchange in keys]

    async def connect(self, world: World) -> Self:
        """Register and attend. The device is attached when this returns."""
        answer = await world.service.Register(self.registration(), NO_CONTEXT)
        self.session = answer.session_id
        for outcome in answer.outcomes:
            self._keep_outcome(outcome)
        received = len(self.messages)
        self.stream = world.spawn(self._attend(world))
        await until(lambda: len(self.messages) > received or self.stream.done(), f"{self.name} is attached")
        if len(self.messages) == received:
            await self.stream  # raises the error that ended it
        return self

    async def leave(self) -> None:
        """The stream breaks."""
        self.stream.cancel()
        await asyncio.gather(self.stream, return_exceptions=True)

    async def _attend(self, world: World, states: Sequence[pb.HeldState] = ()) -> None:
        asked = pb.AttendRequest(session_id=self.session, pending=self._pending(), states=states)
        async for message in world.service.Attend(asked, NO_CONTEXT):
            self.messages.append(message)
            if message.HasField("outcome"):
                self._keep_outcome(message.outcome)
            if message.HasField("assignment") and self.works:
                world.spawn(self.contribute(world, message.assignment))

    def _keep_outcome(self, outcome: Outcome) -> None:
        self.outcomes[key_of(outcome.key)] = outcome
        kept = self.kept.get(key_of(outcome.key))
        if outcome.counted and kept is not None and kept[1].digest == outcome.digest:
            self.states[outcome.key.run_id] = outcome

    def pushed(self, kind: str) -> list[Any]:
        """The pushed messages of one kind: "assignment", "cancel", "outcome"..."""
        return [getattr(message, kind) for message in self.messages if message.HasField(cast(Any, kind))]

    async def assigned(self, round_: int = 0, exchange: int = 0) -> Assignment:
        """The assignment of a round, once it is pushed."""
        wanted = (round_, exchange)

        def probe() -> Assignment | None:
            pushed = reversed(self.pushed("assignment"))
            return next((each for each in pushed if (each.key.round, each.key.exchange) == wanted), None)

        return await until(probe, f"{self.name} is drawn for round {round_}")

    async def contribute(self, world: World, assignment: Assignment) -> Receipt | None:
        """Fetch the bundles, train unless the update is kept, and resume the upload at the coordinator's offset."""
        if assignment.key.round == self.loses_state_in:
            self.loses_state_in = None
            self.states.pop(assignment.key.run_id, None)
        if assignment.HasField("counted") and self.states.get(assignment.key.run_id) != assignment.counted:
            await self.report_failure(world, assignment, pb.FAILURE_REASON_STATE_LOST)
            return None
        header, data = await self.update(world, assignment)
        broken = 0
        while broken < 3:
            try:
                self.receipts.append(await self._send(world, header, data))
            except UploadBroken:
                broken += 1
            except NotNow:  # an earlier upload of the same key, from before the round was drawn again, is still open
                await asyncio.sleep(0.01)
            else:
                return self.receipts[-1]
        raise AssertionError(f"{self.name} sent its update three times, and each upload broke")

    async def report_failure(self, world: World, assignment: Assignment, reason: pb.FailureReason) -> None:
        """Report that the work failed."""
        failure = pb.WorkFailure(key=assignment.key, reason=reason, message="the test asked for it")
        request = pb.ReportStatusRequest(session_id=self.session, failures=[failure])
        await world.service.ReportStatus(request, NO_CONTEXT)

    async def _send(self, world: World, header: UpdateHeader, data: bytes) -> Receipt:
        query = pb.QueryUploadRequest(session_id=self.session, key=header.key, digest=header.digest)
        answer = await world.service.QueryUpload(query, NO_CONTEXT)
        if answer.HasField("receipt"):
            return answer.receipt
        messages = upload(header, data, self.session, answer.kept_bytes)
        return (await world.service.SubmitUpdate(stream(*messages), NO_CONTEXT)).receipt

    async def asked_to_evaluate(self, round_: int = 0, times: int = 1) -> EvaluationAssignment:
        """The evaluation assignment of a round, once `times` of them were pushed."""

        def probe() -> list[EvaluationAssignment]:
            return [each for each in self.pushed("evaluation") if each.key.round == round_][times - 1 :]

        return (await until(probe, f"{self.name} is asked to evaluate round {round_}"))[0]

    async def report(
        self,
        world: World,
        examples: int = 10,
        round_: int = 0,
        sums: Sequence[pb.MetricSum] = (),
        run: str = "r",
        **metrics: float,
    ) -> None:
        """Report an evaluation, requested or not."""
        key = ExchangeKey(run_id=run, round=round_)
        request = pb.ReportEvaluationRequest(
            session_id=self.session, key=key, num_examples=examples, sums=sums, metrics=metrics or {"accuracy": 0.5}
        )
        await world.service.ReportEvaluation(request, NO_CONTEXT)

    async def update(self, world: World, assignment: Assignment) -> tuple[UpdateHeader, bytes]:
        """The update for an assignment, computed once."""
        key, work = key_of(assignment.key), work_of(assignment)
        self.newest[key] = work
        _, header, data = known = self.kept.get(key, (b"", UpdateHeader(), b""))
        if known[0] != work:
            bundles = [await self.fetch(world, resource.digest) for resource in assignment.resources]
            header, data = trained(assignment, bundles, num_examples=10 + len(self.name))
            if self.newest[key] == work:  # else the round was redrawn meanwhile
                self.kept[key] = work, header, data
        header.attempt = assignment.attempt
        return header, data

    async def fetch(self, world: World, digest: tensor_pb2.Digest) -> tuple[int, Layout, bytes]:
        """Kind, layout and bytes of a resource."""
        request = pb.FetchModelRequest(session_id=self.session, digest=digest)
        parts = [pb.FetchModelResponse.FromString(each) async for each in world.service.FetchModel(request, NO_CONTEXT)]
        header = parts[0].header
        data = b"".join(part.chunk.data for part in parts[1:])
        return header.resource.kind, Layout.from_manifest(header.manifest, 1 << 30), data


async def connect(world: World, *names: str, works: bool = False) -> list[Device]:
    """Connected devices; by default they work only when the test asks for it."""
    return [await Device(name, works=works).connect(world) for name in names]


async def deliver(world: World, device: Device, round_: int = 0) -> Receipt | None:
    """The device does its work for a round."""
    return await device.contribute(world, await device.assigned(round_))


def trained(
    assignment: Assignment, bundles: list[tuple[int, Layout, bytes]], num_examples: int = 10
) -> tuple[UpdateHeader, bytes]:
    """An update that depends on the model, on the direction and on the assignment's seed."""
    by_kind = {kind: (layout, unpack(data, layout)) for kind, layout, data in bundles}
    layout, model = by_kind[tensor_pb2.RESOURCE_KIND_MODEL]
    _, direction = by_kind.get(tensor_pb2.RESOURCE_KIND_DIRECTION, (None, {}))
    chance = torch.Generator().manual_seed(assignment.training.seed >> 1)
    parts: list[tuple[PayloadKind, Layout, bytes]] = []
    for kind in assignment.payloads:
        values = {}
        for entry in layout.entries:
            value = model[entry.name]
            noise = torch.rand(entry.shape, generator=chance).to(value.dtype)
            if entry.trainable:
                values[entry.name] = 0.01 * noise - 0.1 * value - 0.01 * direction.get(entry.name, torch.zeros(()))
            elif kind == PAYLOAD_KIND_DELTA:
                values[entry.name] = value + noise if value.is_floating_point() else value + 2
        trains = {entry.name for entry in layout.entries if entry.trainable}
        if assignment.clip:
            values |= clipped({name: tensor for name, tensor in values.items() if name in trains}, assignment.clip)
        here = Layout.of(values, trains)
        parts.append((kind, here, bytes(pack(values, here))))
    payloads = [Payload(kind=kind, manifest=here.to_manifest()) for kind, here, _ in parts]
    data = b"".join(packed for _, _, packed in parts)
    return update_message(assignment, layout, data, num_examples=num_examples, payloads=payloads)


def key_of(key: ExchangeKey) -> Key:
    """The key as a hashable value."""
    return key.run_id, key.round, key.exchange


def work_of(assignment: Assignment) -> bytes:
    """The inputs of an update: state epoch and resources."""
    epoch = str(assignment.state_epoch).encode()
    return b" ".join([epoch, *(resource.digest.value for resource in assignment.resources)])


def update_message(assignment: Assignment, layout: Layout, data: bytes, **changes: Any) -> tuple[UpdateHeader, bytes]:
    """The bytes of an update and a header that fits them; `changes` replace fields of the header."""
    values: dict[str, Any] = {
        "key": assignment.key,
        "payloads": [Payload(kind=PAYLOAD_KIND_DELTA, manifest=layout.to_manifest())],
        "size_bytes": len(data),
        "digest": digest_message(digest_of(data)),
        "num_examples": 10,
        "num_steps": 2,
        "training_loss": 0.5,
        "state_epoch": assignment.state_epoch,
    }
    return UpdateHeader(**{**values, **changes}), data


def upload(
    header: UpdateHeader, data: bytes, session: str, start: int = 0, chunk: int | None = None
) -> Iterator[pb.SubmitUpdateRequest]:
    """The messages of an upload that starts at this offset; by default chunks of 100 bytes or an eighth of the data."""
    chunk = chunk or max(100, len(data) // 8)
    first = UpdateHeader()
    first.CopyFrom(header)
    first.session_id, first.resume_offset = session, start
    yield pb.SubmitUpdateRequest(header=first)
    for offset, length in chunk_spans(len(data), chunk, start):
        yield pb.SubmitUpdateRequest(chunk=make_chunk(data, offset, length))
    yield pb.SubmitUpdateRequest(trailer=UpdateTrailer(size_bytes=header.size_bytes))


async def stream(*messages: Any, hangs: bool = False) -> AsyncIterator[Any]:
    """A request stream of these messages; with `hangs` it never ends."""
    for message in messages:
        yield message
    if hangs:
        await asyncio.Event().wait()
