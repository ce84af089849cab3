"""Many clients in one process that take part in rounds: they fetch the model and send an update that is made at once.

`benchmarks.active_fleet` uses this module. Each client has its own identity, session and TCP connection. Messages are
encoded once for all clients, and what comes is counted and dropped, so that the processors serve the coordinator. The
same process sends and receives the same bytes over bare streams, for the lower bound.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection as Pipe
from typing import Any

import grpc.aio
import numpy as np
import structlog

from benchmarks.constant_task import STEP
from benchmarks.floors import DOWN, UP, chunks_of
from protos.chunks import chunk_spans, encode_chunk
from protos.codec import digest_message, digest_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2 as training
from protos.wire import CHUNK_BYTES, PROTOCOL_MAX, PROTOCOL_MIN, client_options

REGISTERING = 50
"""Clients of a process that connect at the same time."""


@dataclass(frozen=True)
class Crowd:
    """The clients of one process."""

    server: str
    names: tuple[str, ...]
    offer: bytes
    """The TaskOffer of every client, serialized."""
    parameters: int
    """float32 values of the model, in tensors without gaps."""


@dataclass(frozen=True)
class Floor:
    """Asks for turns of bare streams by the first `clients` of a process."""

    port: int
    clients: int
    bytes_each_way: int
    turns: int


@dataclass(frozen=True)
class Count:
    """Asks for `Counts`."""


@dataclass(frozen=True)
class Counts:
    """The clients of a process together."""

    attached: int
    """Clients that are attached now."""
    counted: int
    """Updates that became part of a model."""
    lost: int
    """Connections that broke."""
    failed: int
    """Calls of work that failed and were made again."""


Request = Floor | Count


def live(pipe: Pipe, crowd: Crowd) -> None:
    """Take part until the parent closes the pipe. Replies to `Count` with numbers, and to `Floor` once it is over."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    asyncio.run(_live(pipe, crowd))


async def _live(pipe: Pipe, crowd: Crowd) -> None:
    update, over = _Update.of(crowd.parameters), asyncio.Event()
    clients, tasks = [_Client(crowd, name, update) for name in crowd.names], set[asyncio.Task[None]]()

    async def answer(request: Request) -> None:
        if isinstance(request, Floor):
            await _turns(request)
        pipe.send(Counts(*(sum(getattr(client, field.name) for client in clients) for field in fields(Counts))))

    def asked() -> None:
        try:
            tasks.add(asyncio.create_task(answer(pipe.recv())))
        except (EOFError, OSError):
            over.set()

    asyncio.get_running_loop().add_reader(pipe.fileno(), asked)
    registering = asyncio.Semaphore(REGISTERING)
    tasks.update(asyncio.create_task(client.live(registering)) for client in clients)
    await over.wait()
    asyncio.get_running_loop().remove_reader(pipe.fileno())
    for task in tasks:
        task.cancel()


@dataclass(frozen=True)
class _Update:
    """The update of every client: STEP for each parameter. All but its header is encoded once."""

    size_bytes: int
    digest: bytes
    messages: tuple[bytes, ...]
    """The chunks and the trailer."""

    @classmethod
    def of(cls, parameters: int) -> _Update:
        values = np.full(parameters, STEP, np.float32).tobytes()
        spans = chunk_spans(len(values), CHUNK_BYTES)
        chunks = [encode_chunk(values, offset, length) for offset, length in spans]
        trailer = pb.SubmitUpdateRequest(trailer=training.UpdateTrailer(size_bytes=len(values)))
        return cls(len(values), digest_of(values), (*chunks, trailer.SerializeToString()))


@dataclass
class _Client:
    """One client: attached for as long as its process lives, and at work when it is drawn."""

    crowd: Crowd
    name: str
    update: _Update
    attached: bool = False
    counted: int = 0
    """Updates that became part of a model."""
    lost: int = 0
    """Lost connections."""
    failed: int = 0
    """Calls of its work that failed and were made again."""
    _session: str = ""
    _work: set[asyncio.Task[None]] = field(default_factory=set)

    async def live(self, registering: asyncio.Semaphore) -> None:
        """Stay attached. A connection that is lost is made again, and outstanding work comes again."""
        while True:
            try:
                await self._attend(registering)
            except grpc.aio.AioRpcError as error:
                print(f"{self.name} lost its connection: {error.details()}", file=sys.stderr)
            self.lost += 1
            self.attached = False
            await asyncio.sleep(1.0)

    async def _attend(self, registering: asyncio.Semaphore) -> None:
        async with grpc.aio.insecure_channel(self.crowd.server, options=list(client_options())) as self._channel:
            self._data = self._channel
            async with registering:
                self._session, data_address = await self._register()
            if not data_address:
                await self._take_all()
                return
            address = self.crowd.server.rpartition(":")[0] + data_address
            async with grpc.aio.insecure_channel(address, options=list(client_options())) as self._data:
                await self._take_all()

    async def _take_all(self) -> None:
        async for event in self._stream("Attend", pb.AttendRequest(session_id=self._session)):
            self._take(pb.AttendResponse.FromString(event))

    async def _register(self) -> tuple[str, str]:
        request = pb.RegisterRequest(
            client_id=self.name,
            instance_id=self.name,
            protocol=pb.ProtocolRange(min=PROTOCOL_MIN, max=PROTOCOL_MAX),
            tasks=[pb.TaskOffer.FromString(self.crowd.offer)],
        )
        call: Any = self._channel.unary_unary(_path("Register"))
        while True:
            try:
                answer = pb.RegisterResponse.FromString(await call(request.SerializeToString()))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(2.0)  # many clients register at once
            else:
                return answer.session_id, answer.data_address

    def _take(self, event: pb.AttendResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "attached":
            self.attached = True
        elif kind == "outcome":
            self.counted += event.outcome.counted
        elif kind == "assignment":
            task = asyncio.create_task(self._take_part(event.assignment))
            self._work.add(task)
            task.add_done_callback(self._work.discard)

    async def _take_part(self, assignment: training.Assignment) -> None:
        """Try again after a failed call, as daemons do, until the connection is lost: see `live`."""
        session = self._session
        while self._session == session:
            try:
                await self._contribute(assignment)
            except grpc.aio.AioRpcError:
                self.failed += 1
                await asyncio.sleep(1.0)
            else:
                return

    async def _contribute(self, assignment: training.Assignment) -> None:
        header = await self._fetch(assignment.resources[0].digest)
        payload = training.Payload(kind=assignment.payloads[0], manifest=header.manifest)
        message = pb.SubmitUpdateRequest(
            header=training.UpdateHeader(
                session_id=self._session,
                key=assignment.key,
                attempt=assignment.attempt,
                payloads=[payload],
                size_bytes=self.update.size_bytes,
                digest=digest_message(self.update.digest),
                num_examples=1,
                num_steps=1,
                training_loss=0.0,
            )
        )
        call: Any = self._data.stream_unary(_path("SubmitUpdate"))
        answer = await call(iter((message.SerializeToString(), *self.update.messages)))
        receipt = pb.SubmitUpdateResponse.FromString(answer).receipt
        if not receipt.admitted:
            raise RuntimeError(f"expected an admitted update of {self.name}, got: {receipt.detail}")

    async def _fetch(self, digest: Any) -> pb.ResourceHeader:
        """Receive the model and drop it. Returns its header."""
        first = b""
        async for message in self._stream("FetchModel", pb.FetchModelRequest(session_id=self._session, digest=digest)):
            first = first or message
        return pb.FetchModelResponse.FromString(first).header

    async def _stream(self, method: str, request: Any) -> AsyncIterator[bytes]:
        call: Any = (self._data if method == "FetchModel" else self._channel).unary_stream(_path(method))
        async for message in call(request.SerializeToString()):
            yield message


def _path(method: str) -> str:
    return f"/fl.v1.Coordinator/{method}"


async def _turns(floor: Floor) -> None:
    await asyncio.gather(*(_bare_client(floor) for _ in range(floor.clients)))


async def _bare_client(floor: Floor) -> None:
    chunks = chunks_of(floor.bytes_each_way)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{floor.port}", options=list(client_options())) as channel:
        down: Any = channel.unary_stream(DOWN)
        up: Any = channel.stream_unary(UP)
        for _ in range(floor.turns):
            async for _message in down(b""):
                pass
            await up(iter(chunks))
