"""A coordinator that sends any bytes a test wants, and one correct round on request.

It uses only the contract and shares no code with the real one.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Self

import grpc
import torch
from google.protobuf.message import Message

from algorithms.model_state import read_state
from protos.chunks import chunk_spans, encode_chunk, encode_fetch_header, encode_piece
from protos.codec import Layout, digest_message, pack
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from protos.status import STATUS_DETAILS_KEY, status_metadata
from protos.wire import payload_kind
from tests.processes.process import eventually
from tests.processes.tiny_task import Tiny

CHUNK = 1 << 20
LARGE = 700 << 20
"""Bytes of a model that is not the daemon's."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a call: its code and the bytes of its details."""

    code: grpc.StatusCode
    details: bytes = b""

    @staticmethod
    def of(code: grpc.StatusCode, detail: Message) -> Failure:
        """With a message of errors.proto."""
        ((_, details),) = status_metadata(code.value[0], "as a test wants it", detail)
        return Failure(code, details)


Answer = bytes | Failure
_REQUESTS: dict[str, Any] = {
    "Register": pb.RegisterRequest,
    "Attend": pb.AttendRequest,
    "FetchModel": pb.FetchModelRequest,
    "SubmitUpdate": pb.SubmitUpdateRequest,
    "QueryUpload": pb.QueryUploadRequest,
    "ReportStatus": pb.ReportStatusRequest,
    "ReportEvaluation": pb.ReportEvaluationRequest,
}


class BadCoordinator:
    """Listens on a free port of this machine from its creation on; a context manager."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[Any], Answer]] = {}
        """Method -> answer that replaces the correct one."""
        self.flood: Callable[[], Iterator[bytes]] | None = None
        """Events that every Attend stream sends as fast as possible after the first one."""
        self.calls: dict[str, list[tuple[float, Any]]] = defaultdict(list)
        self.bytes_sent = 0
        self.cut_at = 0
        """Bytes after which a download ends; 0 for a complete one."""
        self.updates: dict[tuple[str, int], list[bytes]] = {}
        self.bundles: dict[bytes, tuple[tensor_pb2.Resource, Layout, bytes]] = {}
        self.offer = pb.TaskOffer()
        self._streams: list[SimpleQueue[Answer | None]] = []
        self._rounds = 0
        self._server = grpc.server(
            ThreadPoolExecutor(64), options=[("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)]
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("fl.v1.Coordinator", self._all()),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        self._server.stop(0.5).wait()

    # Called by the tests.

    def honest(self) -> None:
        """Answer correctly from now on."""
        self.answers.clear()
        self.flood = None
        self.cut_at = 0

    def push(self, *events: pb.AttendResponse | bytes) -> None:
        """Send events on the newest stream."""
        for event in events:
            self._streams[-1].put(event if isinstance(event, bytes) else event.SerializeToString())

    def end(self, failure: Failure) -> None:
        """End the newest stream with a failure."""
        self._streams[-1].put(failure)

    def hang_up(self) -> None:
        """End all streams."""
        for stream in self._streams:
            stream.put(None)

    def count(self, method: str) -> int:
        """Number of received calls."""
        return len(self.calls[method])

    def until_more(self, method: str, than: int) -> None:
        """Wait for another call."""
        eventually(lambda: self.count(method) > than, f"more than {than} calls of {method}")

    @property
    def streams(self) -> int:
        """Open streams."""
        return len(self._streams)

    def until_attended(self, than: int) -> None:
        """Wait for another stream."""
        eventually(lambda: self.streams > than, f"more than {than} streams")

    def failures(self) -> dict[tuple[str, int], pb.WorkFailure]:
        """What the daemon reported, by run and round."""
        reported = [failure for _, request in list(self.calls["ReportStatus"]) for failure in request.failures]
        return {(failure.key.run_id, failure.key.round): failure for failure in reported}

    def failed(self, run_id: str, round_number: int = 0) -> pb.WorkFailure:
        """Wait for the daemon's failure report for this work."""
        return eventually(lambda: self.failures().get((run_id, round_number)), f"{run_id} fails")

    def assignment(self, run_id: str, round_number: int = 0, algorithm: str = "fedavg") -> training_pb2.Assignment:
        """A correct assignment: one epoch from the same first model."""
        made = training_pb2.Assignment(
            key=training_pb2.ExchangeKey(run_id=run_id, round=round_number),
            task=self.offer.name,
            fingerprint=self.offer.fingerprint,
            resources=[self._model()],
            training=training_pb2.LocalTraining(
                algorithm=training_pb2.AlgorithmSpec(name=algorithm),
                learning_rate=0.1,
                local_epochs=1,
                batch_size=16,
                seed=7,
            ),
            payloads=[payload_kind("delta")],
        )
        made.deadline.FromSeconds(600)
        if algorithm == "scaffold":
            made.training.population = 4
            state = read_state(_first_model()).trainable
            zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            made.resources.append(self.publish(tensor_pb2.RESOURCE_KIND_DIRECTION, zeros, set(zeros)))
        return made

    def publish(
        self, kind: tensor_pb2.ResourceKind, tensors: dict[str, torch.Tensor], trainable: set[str]
    ) -> tensor_pb2.Resource:
        """Make a bundle available to fetches."""
        layout = Layout.of(tensors, trainable)
        data = bytes(pack(tensors, layout))
        resource = tensor_pb2.Resource(
            kind=kind,
            digest=digest_message(layout.digest(data)),
            size_bytes=len(data),
            encoding=tensor_pb2.ENCODING_PLAIN,
        )
        self.bundles[resource.digest.value] = (resource, layout, data)
        return resource

    def other_model(self) -> tensor_pb2.Resource:
        """A model that the daemon has not fetched yet: all ones."""
        state = read_state(_first_model())
        ones = {name: torch.ones_like(tensor) for name, tensor in state.trainable.items()}
        return self.publish(tensor_pb2.RESOURCE_KIND_MODEL, ones, set(ones))

    def _model(self) -> tensor_pb2.Resource:
        state = read_state(_first_model())
        return self.publish(tensor_pb2.RESOURCE_KIND_MODEL, state.trainable, set(state.trainable))

    def proper_round(self) -> bytes:
        """Run one correct round; returns the digest of its update, which is the same every time."""
        self._rounds += 1
        run_id = f"honest-{self._rounds}"

        def pushed_and_answered() -> bool:
            # A coordinator does this whenever the daemon reconnects.
            if (streams := len(self._streams)) != seen[0]:
                seen[0] = streams
                self.push(pb.AttendResponse(assignment=self.assignment(run_id)))
            return (run_id, 0) in self.updates

        seen = [0]
        eventually(pushed_and_answered, f"{run_id} gets its update")
        return self.updates[run_id, 0][0]

    # The service.

    def _all(self) -> dict[str, grpc.RpcMethodHandler[bytes, bytes]]:
        unary: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            name: grpc.unary_unary_rpc_method_handler(lambda raw, context, name=name: self._unary(name, raw, context))
            for name in ("Register", "QueryUpload", "ReportStatus", "ReportEvaluation")
        }
        return {
            **unary,
            "Attend": grpc.unary_stream_rpc_method_handler(self._attend),
            "FetchModel": grpc.unary_stream_rpc_method_handler(self._fetch),
            "SubmitUpdate": grpc.stream_unary_rpc_method_handler(self._submit),
        }

    def _note(self, method: str, raw: bytes) -> Any:
        request = _REQUESTS[method].FromString(raw)
        self.calls[method].append((time.monotonic(), request))
        return request

    def _unary(self, method: str, raw: bytes, context: grpc.ServicerContext) -> bytes:
        request = self._note(method, raw)
        if method == "Register":
            self.offer = request.tasks[0]
        if method in self.answers:
            return _given(self.answers[method](request), context)
        if method == "Register":
            return pb.RegisterResponse(session_id=f"s{self.count('Register')}", protocol=1).SerializeToString()
        return b""

    def _attend(self, raw: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        request = self._note("Attend", raw)
        if "Attend" in self.answers:
            yield _given(self.answers["Attend"](request), context)
        stream: SimpleQueue[Answer | None] = SimpleQueue()
        yield pb.AttendResponse(attached=pb.Attached()).SerializeToString()
        self._streams.append(stream)
        context.add_callback(lambda: stream.put(None))
        if self.flood is not None:
            yield from self.flood()
        while (event := stream.get()) is not None:
            yield _given(event, context)

    def _fetch(self, raw: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        request = self._note("FetchModel", raw)
        if request.digest.value not in self.bundles:
            yield from self._zeros()
            return
        resource, layout, data = self.bundles[request.digest.value]
        yield encode_fetch_header(resource, layout.to_manifest())
        for offset, length in chunk_spans(min(len(data), self.cut_at or len(data)), CHUNK):
            self.bytes_sent += length
            yield encode_chunk(data, offset, length)

    def _zeros(self) -> Iterator[bytes]:
        """A model of 700 MiB of zeros."""
        layout = Layout.of({"w": torch.empty(LARGE // 4, device="meta")}, {"w"})
        block = bytes(CHUNK)
        yield encode_fetch_header(tensor_pb2.Resource(), layout.to_manifest())
        for offset in range(0, LARGE, CHUNK):
            self.bytes_sent += CHUNK
            yield encode_piece(block, offset)

    def _submit(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        header = training_pb2.UpdateHeader()
        for raw in requests:
            if (request := pb.SubmitUpdateRequest.FromString(raw)).HasField("header"):
                header = request.header
                self.calls["SubmitUpdate"].append((time.monotonic(), header))
        if "SubmitUpdate" in self.answers:
            return _given(self.answers["SubmitUpdate"](header), context)
        self.updates.setdefault((header.key.run_id, header.key.round), []).append(header.digest.value)
        receipt = training_pb2.Receipt(key=header.key, digest=header.digest, admitted=True)
        return pb.SubmitUpdateResponse(receipt=receipt).SerializeToString()


_LOCK = threading.Lock()


def _first_model() -> torch.nn.Module:
    with _LOCK, torch.random.fork_rng():
        torch.manual_seed(3)
        return Tiny().model()


def _given(answer: Answer, context: grpc.ServicerContext) -> bytes:
    if isinstance(answer, bytes):
        return answer
    if answer.details:
        context.set_trailing_metadata(((STATUS_DETAILS_KEY, answer.details),))
    context.abort(answer.code, "as a test wants it")
    raise AssertionError("abort raises")
