"""The Coordinator service: messages to calls and back; no decisions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext

import grpc.aio
import structlog

from fl_server.broadcast import Broadcast
from fl_server.clients.reports import Reports
from fl_server.coordinator import Coordinator
from fl_server.errors import InvalidInput, NoSuchRun, NotNow
from fl_server.fleet import Fleet
from fl_server.identity import ANYBODY, caller
from fl_server.parts import Parts
from fl_server.run import Run
from fl_server.transfers import Transfer
from fl_server.upload_parts import MOST_VALUES, VALUES_A_TENSOR, Request, Requests, part_of, request_of
from fl_server.uploads import BUSY_WAIT_S, Uploads
from protos.codec import digest_bytes
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import coordinator_pb2_grpc
from protos.fl.v1.training_pb2 import Receipt, RefusalReason, UpdateHeader
from protos.wire import KEEPALIVE_SECONDS, MAX_CHUNK_BYTES

log = structlog.get_logger()
Context = grpc.aio.ServicerContext
SERVICE = "fl.v1.Coordinator"


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    """What client daemons call."""

    def __init__(self, parts: Parts, coordinator: Coordinator, uploads: Uploads) -> None:
        self._parts = parts
        self._fleet: Fleet = parts.fleet
        self._coordinator = coordinator
        self._uploads = uploads
        self._transfer_limits = parts.fleet.transfer_limits
        self._reports = Reports(parts, coordinator)

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        """Open a session, and tell what was decided since the client was last here."""
        session, protocol = await self._fleet.register(request)
        response = pb.RegisterResponse(
            session_id=session.id,
            protocol=protocol,
            coordinator_id=self._parts.ledger.store.coordinator_id,
            limits=self._limits(),
        )
        response.outcomes.extend(await self._coordinator.outcomes(request.pending, session.client_id))
        held = dict.fromkeys(held.run_id for held in request.states)
        response.ended_runs.extend(filter(self._coordinator.forgets, held))
        return response

    def _limits(self) -> pb.Limits:
        limits = pb.Limits(max_chunk_bytes=MAX_CHUNK_BYTES, chunk_bytes=self._parts.config.limits.chunk_bytes)
        limits.keepalive.FromSeconds(KEEPALIVE_SECONDS)
        limits.reattach_grace.FromMilliseconds(int(self._parts.config.limits.reattach_grace_s * 1000))
        return limits

    async def Attend(self, request: pb.AttendRequest, context: Context) -> AsyncIterator[pb.AttendResponse]:
        """Push the client its work for as long as it listens."""
        async with self._transfer_limits.call(self._client(request.session_id), "attends"):
            async for message in self._fleet.attend(request.session_id):
                yield message

    def _client(self, session_id: str) -> str:
        """Whose session it is. Raises UnknownSessionError, Forbidden."""
        return self._fleet.session(session_id).client_id

    async def FetchModel(self, request: pb.FetchModelRequest, context: Context) -> AsyncIterator[bytes]:
        """Messages that are encoded already: the serializer of this method hands bytes through.

        A reader that takes nothing keeps its place among the client's downloads: the transport lets go of what it has
        in hand for it only when the reader takes that or hangs up, and not when the call is ended here.
        """
        async with self._transfer_limits.call(self._client(request.session_id), "downloads"):
            with self._fleet.transfer(request.session_id) as transfer:
                async for message in self._messages(request, transfer):
                    yield message

    async def _messages(self, request: pb.FetchModelRequest, transfer: Transfer) -> AsyncIterator[bytes]:
        digest = _digest(request.digest, "digest")
        run, broadcast = self._sent_out(request, digest)
        if request.offset > broadcast.resource.size_bytes:
            raise InvalidInput("offset", f"at most the size, {broadcast.resource.size_bytes}", request.offset)
        client, one = transfer.client_id, self._transfer_limits.of(transfer.client_id)
        fetch = one.allowance.fetch(digest, len(broadcast.header) + broadcast.resource.size_bytes)
        sent, places = self._parts.metrics.bytes.labels("down", broadcast.kind), broadcast.places(request.offset)
        if broadcast.kind == "model":
            run.log.fetches(client, request.offset)
        # Each message is looked up in its turn: a reader that is slow or silent keeps no model of an earlier round.
        del broadcast
        for place in places:
            transfer.check()
            message, count = self._sent_out(request, digest)[1].message(place)
            if excess := fetch.send(count or len(message), time.monotonic()):
                raise self._transfer_limits.exceeded(client, excess)
            yield message
            sent.inc(count)
            run.log.bytes_down += count
            await one.pace(count)

    def _sent_out(self, request: pb.FetchModelRequest, digest: bytes) -> tuple[Run, Broadcast]:
        """What is to be fetched, by who may. Raises UnknownSessionError, Forbidden, NoSuchResource."""
        self._fleet.session(request.session_id)
        return self._coordinator.resource(digest)

    async def SubmitUpdate(self, request_iterator: Requests, context: Context) -> pb.SubmitUpdateResponse:
        """Take an upload. Its chunks come as `request_of` reads them."""
        holder = _holder(context)
        async with self._transfer_limits.call(holder, "uploads") if holder else nullcontext():
            requests = aiter(request_iterator)
            header = await self._header(requests)
            client = self._client(header.session_id)
            async with self._transfer_limits.call(client, "uploads") if client != holder else nullcontext():
                with self._fleet.transfer(header.session_id) as transfer:
                    receipt = await self._submit(transfer, header, requests)
                    if receipt.admitted:
                        self._fleet.proved(header.session_id)
                    return pb.SubmitUpdateResponse(receipt=receipt)

    async def _header(self, requests: Requests) -> UpdateHeader:
        """The first message of an upload, which must come in time. Raises NotNow, InvalidInput."""
        stall_s = self._parts.config.limits.stall_s
        try:
            async with asyncio.timeout(stall_s):
                first = await anext(requests, None)
        except TimeoutError:
            raise NotNow(f"no header of an upload came in {stall_s:g} s", BUSY_WAIT_S) from None
        if not isinstance(first, pb.SubmitUpdateRequest) or not first.HasField("header"):
            raise InvalidInput("part", "a header first", part_of(first))
        return first.header

    async def _submit(self, transfer: Transfer, header: UpdateHeader, requests: Requests) -> Receipt:
        try:
            run = self._coordinator.run(header.key.run_id)
        except NoSuchRun:
            late = RefusalReason.REFUSAL_REASON_LATE
            return Receipt(key=header.key, digest=header.digest, reason=late, detail="no such run")
        return await self._uploads.submit(run, header, transfer, requests)

    def read_part(self, message: bytes) -> Request:
        """A message of SubmitUpdate from its bytes. Raises InvalidInput."""
        return request_of(message, self._most_values)

    def _most_values(self) -> int:
        """In a header: enough for the largest model whose round may be open."""
        tensors = max(
            (len(run.model.engine.layout.entries) for run in self._coordinator.runs() if run.model.loaded), default=0
        )
        return max(MOST_VALUES, VALUES_A_TENSOR * tensors)

    async def QueryUpload(self, request: pb.QueryUploadRequest, context: Context) -> pb.QueryUploadResponse:
        """Where an upload goes on, or that it is decided."""
        client = self._client(request.session_id)
        async with self._transfer_limits.call(client, "queries"):
            run = self._coordinator.run(request.key.run_id)
            if not run.intake.unheard(request.key, client):
                receipt = await self._uploads.receipt(run, request.key, client)
                if receipt is not None:
                    return pb.QueryUploadResponse(receipt=receipt)
            digest = _digest(request.digest, "digest")
            if run.intake.refusal(request.key, client) is not None:
                return pb.QueryUploadResponse()  # nothing is taken for the key, so nothing is looked up
            return pb.QueryUploadResponse(kept_bytes=await self._uploads.kept_bytes(request.key, client, digest))

    async def ReportStatus(self, request: pb.ReportStatusRequest, context: Context) -> pb.ReportStatusResponse:
        """Availability, and work that was given up."""
        await self._reports.take(self._fleet.session(request.session_id).client_id, request)
        return pb.ReportStatusResponse()

    async def ReportEvaluation(
        self, request: pb.ReportEvaluationRequest, context: Context
    ) -> pb.ReportEvaluationResponse:
        """Keep a client's evaluation."""
        client_id = self._client(request.session_id)
        async with self._transfer_limits.call(client_id, "queries"):
            run = self._coordinator.run(request.key.run_id)
            await run.client_evaluations.report(client_id, request)
        return pb.ReportEvaluationResponse()


def _holder(context: Context) -> str:
    """Whom a call counts for before it names a session: the certificate's holder, without one the connection."""
    who = caller.get()
    if who is not ANYBODY:
        return who.name
    return "" if context is None else context.peer()


def _digest(message: object, field: str) -> bytes:
    try:
        return digest_bytes(message)  # type: ignore[arg-type]
    except ValueError as error:
        raise InvalidInput(field, "a BLAKE3-256 digest", str(error)) from error


def handlers(service: CoordinatorService) -> grpc.GenericRpcHandler:
    """The service's methods as the generated code has them, but for what carries chunks.

    FetchModel's messages are bytes already, and SubmitUpdate's chunks are read where they lie.
    """
    one, up, down = (
        grpc.unary_unary_rpc_method_handler,
        grpc.stream_unary_rpc_method_handler,
        grpc.unary_stream_rpc_method_handler,
    )
    methods = {
        "Register": _method(one, service.Register, pb.RegisterRequest, pb.RegisterResponse),
        "Attend": _method(down, service.Attend, pb.AttendRequest, pb.AttendResponse),
        "FetchModel": down(
            service.FetchModel, request_deserializer=pb.FetchModelRequest.FromString, response_serializer=bytes
        ),
        "SubmitUpdate": up(
            service.SubmitUpdate,
            request_deserializer=service.read_part,
            response_serializer=pb.SubmitUpdateResponse.SerializeToString,
        ),
        "QueryUpload": _method(one, service.QueryUpload, pb.QueryUploadRequest, pb.QueryUploadResponse),
        "ReportStatus": _method(one, service.ReportStatus, pb.ReportStatusRequest, pb.ReportStatusResponse),
        "ReportEvaluation": _method(
            one, service.ReportEvaluation, pb.ReportEvaluationRequest, pb.ReportEvaluationResponse
        ),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _method(make, behaviour, request, response):  # type: ignore[no-untyped-def]
    return make(behaviour, request_deserializer=request.FromString, response_serializer=response.SerializeToString)
