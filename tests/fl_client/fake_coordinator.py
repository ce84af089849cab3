"""A scripted coordinator, and a tiny task for daemons in the test's process."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import torch
from torch import Tensor, nn

from fl_tasks import Examples, Shard
from protos import chunks, codec
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import coordinator_pb2_grpc, errors_pb2, tensor_pb2, training_pb2
from protos.status import status_metadata
from protos.wire import server_options

torch.set_num_threads(1)

TIMEOUT_S = 60.0
"""Longest wait of a test, in seconds."""


class TinyModel(nn.Module):
    """y = scale * w[0] * x, with a count of its training batches."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """[n] -> [n]."""
        if self.training:
            self.seen += 1
        return self.scale * self.w[0] * x


class TinyTask:
    """Inputs 1 and 2 with targets 2 and 4. Signals when a step begins; blocks or raises as the test sets it."""

    version = "1"

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.steps = 0
        self.started = threading.Event()
        self.error: BaseException | None = None
        self.block: threading.Event | None = None

    def model(self) -> nn.Module:
        """w of `size` numbers."""
        return TinyModel(self.size)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean square error."""
        self.steps += 1
        self.started.set()
        if self.block is not None:
            self.block.wait()
        if self.error is not None:
            raise self.error
        return ((output - target) ** 2).mean()

    def train_data(self, shard: Shard) -> Examples:
        """Both examples."""
        return shard.of(Examples(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])))

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """The same."""
        return self.train_data(shard or Shard())

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Square errors."""
        return {"loss": (output - target) ** 2}


FINGERPRINT = training_pb2.TaskFingerprint(version="1", source="sha256:tiny")


def key(round_number: int) -> training_pb2.ExchangeKey:
    """The key of a round of the only run."""
    return training_pb2.ExchangeKey(run_id="run", round=round_number)


Fault = Any
"""A detail, a detail with its status code, a number of chunks or of a reason, or None for a call that passes."""


class FakeCoordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Pushes a test's events, keeps all requests, and fails where the test sets a fault."""

    def __init__(self) -> None:
        self.port = 0
        self.id = "fake"
        self.chunk_bytes = 64
        self.streams: dict[str, asyncio.Queue[pb.AttendResponse | None]] = {}
        self.outstanding: list[pb.AttendResponse] = []
        self.bundles: dict[bytes, tuple[tensor_pb2.Resource, codec.Layout, bytes]] = {}
        self.calls: dict[str, list[Any]] = defaultdict(list)
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.kept: dict[bytes, bytearray] = defaultdict(bytearray)
        self.receipts: dict[str, training_pb2.Receipt] = {}
        self.updates: dict[int, tuple[training_pb2.UpdateHeader, bytes]] = {}
        self.outcomes: list[training_pb2.Outcome] = []
        self.ended_runs: list[str] = []
        self._changed = asyncio.Condition()

    # called by the tests

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeCoordinator]:
        """Listen on a free port the first time, and on the same one later."""
        server = grpc.aio.server(options=server_options())
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        try:
            yield self
        finally:
            self.streams.clear()
            await server.stop(None)

    async def until(self, true: Callable[[], Any]) -> None:
        """Wait until the received messages make the condition true."""
        async with asyncio.timeout(TIMEOUT_S), self._changed:
            await self._changed.wait_for(true)

    async def until_called(self, method: str, times: int = 1) -> None:
        """Wait until a method was called at least so often."""
        await self.until(lambda: len(self.calls[method]) >= times)

    def push(self, **event: Any) -> None:
        """Send an event to every stream."""
        for stream in self.streams.values():
            stream.put_nowait(pb.AttendResponse(**event))

    def hang_up(self) -> None:
        """End every stream."""
        for stream in self.streams.values():
            stream.put_nowait(None)

    def assign(self, assignment: training_pb2.Assignment) -> None:
        """Push an assignment, and repeat it to every new stream until its update has arrived."""
        self.outstanding.append(pb.AttendResponse(assignment=assignment))
        self.push(assignment=assignment)

    def publish(
        self, kind: tensor_pb2.ResourceKind, tensors: dict[str, Tensor], trainable: set[str]
    ) -> tensor_pb2.Resource:
        """Make a bundle available to fetches."""
        layout = codec.Layout.of(tensors, trainable)
        data = bytes(codec.pack(tensors, layout))
        digest = layout.digest(data)
        resource = tensor_pb2.Resource(
            kind=kind,
            digest=codec.digest_message(digest),
            size_bytes=len(data),
            encoding=tensor_pb2.ENCODING_PLAIN,
        )
        self.bundles[digest] = (resource, layout, data)
        return resource

    def assignment(self, round_number: int = 0, *, size: int = 1, **changes: Any) -> training_pb2.Assignment:
        """One step of FedAvg at rate 0.01 over both examples, from w = 0 and seen = 5."""
        model = {"w": torch.zeros(size), "seen": torch.tensor(5)}
        resources = [
            self.publish(tensor_pb2.RESOURCE_KIND_MODEL, model, {"w"}),
            self.publish(tensor_pb2.RESOURCE_KIND_FROZEN, {"scale": torch.ones(())}, set()),
        ]
        local = {"local_epochs": 1} if "local_steps" not in changes else {"local_steps": changes.pop("local_steps")}
        training = training_pb2.LocalTraining(
            algorithm=training_pb2.AlgorithmSpec(name=changes.pop("algorithm", "fedavg")),
            learning_rate=0.01,
            batch_size=2,
            seed=7,
            **local,
        )
        values: dict[str, Any] = {
            "key": key(round_number),
            "task": "tiny",
            "fingerprint": FINGERPRINT,
            "resources": resources,
            "training": training,
            "payloads": [training_pb2.PAYLOAD_KIND_DELTA],
        }
        return training_pb2.Assignment(**{**values, **changes})

    # the service

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        """Open session number n."""
        await self._note("Register", request)
        await self._fail("Register", context)
        limits = pb.Limits(chunk_bytes=self.chunk_bytes)
        return pb.RegisterResponse(
            session_id=f"s{len(self.calls['Register'])}",
            protocol=1,
            coordinator_id=self.id,
            limits=limits,
            outcomes=self.outcomes,
            ended_runs=self.ended_runs,
        )

    async def Attend(self, request: pb.AttendRequest, context: Any) -> AsyncIterator[pb.AttendResponse]:
        """Send Attached, the outstanding assignments, and then the pushed events."""
        await self._fail("Attend", context)
        if request.session_id in self.streams:
            self.streams[request.session_id].put_nowait(None)
        stream = self.streams[request.session_id] = asyncio.Queue()
        yield pb.AttendResponse(attached=pb.Attached())
        for outcome in self.outcomes:
            if outcome.key in request.pending:
                yield pb.AttendResponse(outcome=outcome)
        for state in request.states:
            if state.run_id in self.ended_runs:
                yield pb.AttendResponse(run_ended=pb.RunEnded(run_id=state.run_id))
        for event in self.outstanding:
            yield event
        await self._note("Attend", request)
        while (pushed := await stream.get()) is not None:
            yield pushed

    async def FetchModel(self, request: pb.FetchModelRequest, context: Any) -> AsyncIterator[pb.FetchModelResponse]:
        """The bundle from the chunk border at or below the offset. A fault is a number of chunks before the cut."""
        await self._note("FetchModel", request)
        resource, layout, data = self.bundles[request.digest.value]
        if resource.kind == tensor_pb2.RESOURCE_KIND_MODEL:
            await self._fail("Fetch", context)
        yield pb.FetchModelResponse(header=pb.ResourceHeader(resource=resource, manifest=layout.to_manifest()))
        cut = self.faults["cut_fetch"].pop(0) if self.faults["cut_fetch"] else None
        damage = self.faults["damage_fetch"].pop(0) if self.faults["damage_fetch"] else None
        start = request.offset // self.chunk_bytes * self.chunk_bytes
        for number, (offset, length) in enumerate(chunks.chunk_spans(len(data), self.chunk_bytes, start)):
            if number == cut:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            chunk = chunks.make_chunk(data, offset, length)
            if number == damage:
                chunk.data = bytes(length)[:-1] + b"\x01"
            yield pb.FetchModelResponse(chunk=chunk)

    async def QueryUpload(self, request: pb.QueryUploadRequest, context: Any) -> pb.QueryUploadResponse:
        """The received bytes, or the receipt."""
        await self._note("QueryUpload", request)
        await self._fail("QueryUpload", context)
        return pb.QueryUploadResponse(
            kept_bytes=len(self.kept[request.digest.value]), receipt=self.receipts.get(str(request.key))
        )

    async def SubmitUpdate(self, requests: AsyncIterator[Any], context: Any) -> pb.SubmitUpdateResponse:
        """Keep every chunk. A fault is the number of chunks before the cut."""
        cut = self.faults["cut_upload"].pop(0) if self.faults["cut_upload"] else None
        header, count = training_pb2.UpdateHeader(), 0
        async for request in requests:
            if request.HasField("header"):
                header = request.header
                await self._note("SubmitUpdate", header)
                await self._fail("SubmitUpdate", context)
                continue
            kept = self.kept[header.digest.value]
            if request.HasField("chunk"):
                if count == cut:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                kept += chunks.check_chunk(request.chunk, len(kept), self.chunk_bytes, header.size_bytes)
                count += 1
        data = bytes(self.kept[header.digest.value])
        receipt = training_pb2.Receipt(key=header.key, digest=header.digest, admitted=True)
        if self.faults["refuse"]:
            receipt = training_pb2.Receipt(key=header.key, digest=header.digest, reason=self.faults["refuse"].pop(0))
        self.receipts[str(header.key)] = receipt
        self.updates[header.key.round] = (header, data)
        self.outstanding = [event for event in self.outstanding if event.assignment.key != header.key]
        await self._note("admitted", header)
        return pb.SubmitUpdateResponse(receipt=receipt)

    async def ReportStatus(self, request: pb.ReportStatusRequest, context: Any) -> pb.ReportStatusResponse:
        """Record a request that does not fail."""
        await self._fail("ReportStatus", context)
        await self._note("ReportStatus", request)
        return pb.ReportStatusResponse()

    async def ReportEvaluation(self, request: pb.ReportEvaluationRequest, context: Any) -> pb.ReportEvaluationResponse:
        """Record the request."""
        await self._note("ReportEvaluation", request)
        await self._fail("ReportEvaluation", context)
        return pb.ReportEvaluationResponse()

    async def _note(self, method: str, request: Any) -> None:
        async with self._changed:
            self.calls[method].append(request)
            self._changed.notify_all()

    async def _fail(self, method: str, context: Any) -> None:
        """End the call with the method's next fault: a detail, or one with its code. None lets the call pass."""
        fault: Any = self.faults[method].pop(0) if self.faults[method] else None
        if fault is not None:
            detail, code = fault if isinstance(fault, tuple) else (fault, CODES[type(fault)])
            context.set_trailing_metadata(status_metadata(code.value[0], "injected failure", detail))
            await context.abort(code, "injected failure")


CODES = {
    errors_pb2.UnknownSession: grpc.StatusCode.UNAUTHENTICATED,
    errors_pb2.SessionFenced: grpc.StatusCode.ABORTED,
    errors_pb2.ProtocolMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors_pb2.NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    errors_pb2.RetryLater: grpc.StatusCode.UNAVAILABLE,
    errors_pb2.BrokenUpload: grpc.StatusCode.DATA_LOSS,
    errors_pb2.UnknownResource: grpc.StatusCode.NOT_FOUND,
    errors_pb2.InvalidField: grpc.StatusCode.INVALID_ARGUMENT,
}
