"""A client written by hand from the contract: it says whatever a test wants, right or wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import torch

from protos.chunks import chunk_spans, make_chunk
from protos.codec import Layout, pack, unpack
from protos.digests import digest_message, digest_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import coordinator_pb2_grpc, training_pb2
from protos.wire import client_options
from tasks import fingerprint
from tests.integration.harness import TASK, Coordinator
from tests.integration.processes import PATIENCE_S, eventually
from tests.integration.tiny_task import Tiny

Tensors = dict[str, torch.Tensor]


@dataclass
class Update:
    """What `RawClient.submit` sends; a test changes what it wants to be wrong."""

    header: training_pb2.UpdateHeader
    data: bytes
    trailer: training_pb2.UpdateTrailer = field(default_factory=training_pb2.UpdateTrailer)

    def renamed_digest(self) -> Self:
        """The header names the bytes as they are now."""
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
        """A registration as a daemon of the tiny task sends it, but for the changes."""
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
        response = self.stub.Register(self.hello(**changes), timeout=PATIENCE_S)
        self.session_id = response.session_id
        return response

    def attend(self) -> Iterator[pb.AttendResponse]:
        """The session's events; the first, Attached, has come when this returns."""
        events = self.stub.Attend(pb.AttendRequest(session_id=self.session_id), timeout=PATIENCE_S)
        assert next(events).HasField("attached")
        return events

    def fetch(self, resource: Any) -> tuple[Layout, bytes]:
        """A resource's layout and bytes."""
        request = pb.FetchModelRequest(session_id=self.session_id, digest=resource.digest)
        parts = list(self.stub.FetchModel(request, timeout=PATIENCE_S))
        layout = Layout.from_manifest(parts[0].header.manifest, 1 << 30)
        return layout, b"".join(part.chunk.data for part in parts[1:])

    def update(self, assignment: training_pb2.Assignment) -> Update:
        """A proper answer: a delta of ones, and the buffers as they came."""
        layout, data = self.fetch(assignment.resources[0])
        values = unpack(data, layout)
        trainable = {entry.name for entry in layout.entries if entry.trainable}
        answer = {name: torch.ones_like(value) if name in trainable else value for name, value in values.items()}
        return self.update_of(assignment, answer)

    def update_of(self, assignment: training_pb2.Assignment, tensors: Tensors) -> Update:
        """An answer of these tensors, all trainable, with a header that fits them."""
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
        """Send an update in small chunks, and take the receipt."""
        return self.stub.SubmitUpdate(iter(messages(update, chunk_bytes)), timeout=PATIENCE_S).receipt

    def query(self, update: Update) -> pb.QueryUploadResponse:
        """How far an update came."""
        request = pb.QueryUploadRequest(session_id=self.session_id, key=update.header.key, digest=update.header.digest)
        return self.stub.QueryUpload(request, timeout=PATIENCE_S)


def messages(update: Update, chunk_bytes: int) -> list[pb.SubmitUpdateRequest]:
    """The stream of an update from its header's resume offset on."""
    spans = chunk_spans(len(update.data), chunk_bytes, update.header.resume_offset)
    chunks = [make_chunk(update.data, offset, length) for offset, length in spans]
    return [
        pb.SubmitUpdateRequest(header=update.header),
        *(pb.SubmitUpdateRequest(chunk=chunk) for chunk in chunks),
        pb.SubmitUpdateRequest(trailer=update.trailer),
    ]


HALF_BYTES = 128
"""What comes before the halt, in chunks of 64."""


class HaltedUpload:
    """A client that stands still in the middle of its upload, until `goes_on` is set."""

    def __init__(self, server: Coordinator, client: RawClient) -> None:
        client.register()
        self.pushed = client.attend()
        self.run = server.create("shutdown", round={"clients_per_round": 1, "min_clients": 1}, stop={"rounds": 2})
        assignment = next(event for event in self.pushed if event.HasField("assignment")).assignment
        self.update = client.update(assignment)
        self.goes_on, self.client = threading.Event(), client
        self.receipt = client.stub.SubmitUpdate.future(self._halting())
        eventually(lambda: self.kept() == HALF_BYTES, "half of it is kept")

    def _halting(self) -> Iterator[pb.SubmitUpdateRequest]:
        for number, message in enumerate(messages(self.update, 64)):
            if number == 1 + HALF_BYTES // 64:
                self.goes_on.wait(PATIENCE_S)
            yield message

    def kept(self) -> int:
        """Bytes that the coordinator says it has."""
        return self.client.query(self.update).kept_bytes
