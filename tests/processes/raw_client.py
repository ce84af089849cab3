"""A client on the generated stubs: a test chooses every message, valid or not."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import torch
from google.protobuf.message import Message

from fl_tasks import fingerprint
from protos.chunks import chunk_spans, make_chunk
from protos.codec import Layout, pack, unpack
from protos.digests import digest_message, digest_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import coordinator_pb2_grpc, training_pb2
from protos.status import detail_of
from protos.wire import client_options
from tests.processes.federation import TASK, Coordinator
from tests.processes.planted import plant
from tests.processes.process import TIMEOUT_S, eventually
from tests.processes.tiny_task import Tiny

Tensors = dict[str, torch.Tensor]


@dataclass
class Update:
    """The content of an upload; a test changes one part of it."""

    header: training_pb2.UpdateHeader
    data: bytes
    trailer: training_pb2.UpdateTrailer = field(default_factory=training_pb2.UpdateTrailer)

    def renamed_digest(self) -> Self:
        """Put the digest of the current bytes into the header."""
        self.header.digest.CopyFrom(digest_message(digest_of(self.data)))
        return self


class RawClient:
    """One connection; a context manager. Calls raise grpc.RpcError."""

    def __init__(
        self, address: str, client_id: str = "raw-1", credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        self.client_id = client_id
        options = list(client_options())
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options)
        self.stub: Any = coordinator_pb2_grpc.CoordinatorStub(self._channel)
        self.session_id = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def hello(self, **changes: Any) -> pb.RegisterRequest:
        """A registration like that of a daemon with the tiny task, with changes."""
        version, source = fingerprint(Tiny())
        offer = pb.TaskOffer(
            name=TASK,
            fingerprint=training_pb2.TaskFingerprint(version=version, source=source),
            train_examples=10,
        )
        fields: dict[str, Any] = {
            "client_id": self.client_id,
            "instance_id": f"{self.client_id}-1",
            "protocol": pb.ProtocolRange(min=1, max=1),
            "software": "raw",
            "device": pb.Device(kind="cpu"),
            "tasks": [offer],
            **changes,
        }
        return pb.RegisterRequest(**fields)

    def register(self, **changes: Any) -> pb.RegisterResponse:
        """Open a session."""
        response: pb.RegisterResponse = self.stub.Register(self.hello(**changes), timeout=TIMEOUT_S)
        self.session_id = plant(response.session_id, "a session id")
        return response

    def attend(self) -> Iterator[pb.AttendResponse]:
        """The session's events; waits for the first one, Attached."""
        events: Iterator[pb.AttendResponse] = self.stub.Attend(
            pb.AttendRequest(session_id=self.session_id), timeout=TIMEOUT_S
        )
        assert next(events).HasField("attached")
        return events

    def fetch(self, resource: Any) -> tuple[Layout, bytes]:
        """A resource's layout and bytes."""
        request = pb.FetchModelRequest(session_id=self.session_id, digest=resource.digest)
        parts = list(self.stub.FetchModel(request, timeout=TIMEOUT_S))
        layout = Layout.from_manifest(parts[0].header.manifest, 1 << 30)
        return layout, b"".join(part.chunk.data for part in parts[1:])

    def update(self, assignment: training_pb2.Assignment) -> Update:
        """A correct update: a delta of ones and unchanged buffers."""
        layout, data = self.fetch(assignment.resources[0])
        values = unpack(data, layout)
        trainable = {entry.name for entry in layout.entries if entry.trainable}
        answer = {name: torch.ones_like(value) if name in trainable else value for name, value in values.items()}
        return self.update_of(assignment, answer)

    def update_of(self, assignment: training_pb2.Assignment, tensors: Tensors) -> Update:
        """An update of these tensors, all trainable, with a matching header."""
        layout = Layout.of(tensors, tensors.keys())
        data = bytes(pack(tensors, layout))
        header = training_pb2.UpdateHeader(
            session_id=self.session_id,
            key=assignment.key,
            attempt=assignment.attempt,
            payloads=[training_pb2.Payload(kind=training_pb2.PAYLOAD_KIND_DELTA, manifest=layout.to_manifest())],
            size_bytes=len(data),
            digest=digest_message(digest_of(data)),
            num_examples=10,
            num_steps=1,
            state_epoch=assignment.state_epoch,
        )
        return Update(header, data, training_pb2.UpdateTrailer(size_bytes=len(data)))

    def submit(self, update: Update, chunk_bytes: int = 64) -> training_pb2.Receipt:
        """Send an update in small chunks; returns the receipt."""
        stream = iter(messages(update, chunk_bytes))
        receipt: training_pb2.Receipt = self.stub.SubmitUpdate(stream, timeout=TIMEOUT_S).receipt
        return receipt

    def query(self, update: Update) -> pb.QueryUploadResponse:
        """State of an upload."""
        request = pb.QueryUploadRequest(session_id=self.session_id, key=update.header.key, digest=update.header.digest)
        response: pb.QueryUploadResponse = self.stub.QueryUpload(request, timeout=TIMEOUT_S)
        return response


def messages(update: Update, chunk_bytes: int) -> list[pb.SubmitUpdateRequest]:
    """The stream of an update from its header's resume offset on."""
    spans = chunk_spans(len(update.data), chunk_bytes, update.header.resume_offset)
    chunks = [make_chunk(update.data, offset, length) for offset, length in spans]
    return [
        pb.SubmitUpdateRequest(header=update.header),
        *(pb.SubmitUpdateRequest(chunk=chunk) for chunk in chunks),
        pb.SubmitUpdateRequest(trailer=update.trailer),
    ]


def detail(error: grpc.RpcError) -> Message | None:
    """The message of errors.proto in a refused call; None if there is none."""
    call: Any = error
    return detail_of(call.trailing_metadata())


HALF_BYTES = 128
"""Bytes before the halt, in chunks of 64."""


def halting(parts: Sequence[pb.SubmitUpdateRequest], goes_on: threading.Event) -> Iterator[pb.SubmitUpdateRequest]:
    """The messages of an upload, which stops in the middle."""
    for number, message in enumerate(parts):
        if number == 1 + HALF_BYTES // 64:
            goes_on.wait(TIMEOUT_S)
        yield message


class HaltedUpload:
    """A client that stops during its upload until `goes_on` is set."""

    def __init__(self, server: Coordinator, client: RawClient) -> None:
        client.register()
        self.pushed = client.attend()
        self.run = server.create("shutdown", round={"clients_per_round": 1, "min_clients": 1}, stop={"rounds": 2})
        assignment = next(event for event in self.pushed if event.HasField("assignment")).assignment
        self.update = client.update(assignment)
        self.goes_on, self.client = threading.Event(), client
        self.receipt = client.stub.SubmitUpdate.future(halting(messages(self.update, 64), self.goes_on))
        eventually(lambda: self.kept() == HALF_BYTES, "half of it is kept")

    def kept(self) -> int:
        """Number of bytes that the coordinator has received."""
        return self.client.query(self.update).kept_bytes
