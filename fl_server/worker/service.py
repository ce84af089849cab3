"""The methods of the Coordinator service that a worker serves: those that move the bytes of models and updates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from fl_server.rpc.downloads import digest_in
from fl_server.rpc.requests import parse_request
from fl_server.rpc.service import SERVICE, holder_of, read_header
from fl_server.uploads.part_receiver import Decided, Disk, PartReceiver, spool_key
from fl_server.uploads.stream import Request, Requests
from fl_server.worker.link import Link, caller_now
from fl_server.worker.resources import Copies, Copy
from fl_server.worker.transfer import CoordinatedTransfer, EarlyAnswer
from fl_server.worker.upload import RelayedUpload, Store, WorkerFiles
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import worker_pb2

Context = grpc.aio.ServicerContext[Any, Any]
MOST_VALUES = 1 << 18
"""Values in a header. The coordinator compares it with what it expects."""


class DataService:
    """FetchModel, SubmitUpdate and QueryUpload of one worker."""

    def __init__(self, link: Link, disk: Disk, copies: Copies, files: WorkerFiles | None) -> None:
        """files: the object store that has the updates; None: the coordinator has the folder of the spool too."""
        self._link, self._disk, self._copies, self._store = link, disk, copies, Store(disk.spool, files)
        self._parts = PartReceiver(disk)
        self.in_flight = 0
        """Transfers under way."""

    async def FetchModel(self, request: pb.FetchModelRequest, context: Context) -> AsyncIterator[bytes]:
        """Send a resource: encoded messages, from the machine's copy."""
        async with self._disk.limits.call(holder_of(context), "downloads"):
            async for message in self._resource(request):
                yield message

    async def _resource(self, request: pb.FetchModelRequest) -> AsyncIterator[bytes]:
        digest = digest_in(request.digest, "digest")
        call = self._link.stream("SendResource", worker_pb2.SendResourceRequest, worker_pb2.SendResourceResponse)
        transfer = CoordinatedTransfer(call, lambda count: worker_pb2.SendResourceRequest(sent=count))
        self.in_flight += 1
        try:
            async with transfer:
                opening = worker_pb2.DownloadOpening(caller=caller_now(), request=request)
                with suppress(EarlyAnswer):
                    await transfer.send(worker_pb2.SendResourceRequest(opening=opening))
                plan = (await transfer.answer()).plan
                transfer.begin(plan.report_bytes)
                copy = await self._copies.of(digest)
                try:
                    async for message in _messages(copy, request.offset, transfer):
                        yield message
                    await transfer.finish()
                except EarlyAnswer:
                    await transfer.answer()
        finally:
            self.in_flight -= 1

    async def SubmitUpdate(self, request_iterator: Requests, context: Context) -> pb.SubmitUpdateResponse:
        """Receive an update into the spool."""
        async with self._disk.limits.call(holder_of(context), "uploads"):
            requests = aiter(request_iterator)
            header = await read_header(requests, self._disk.config.limits.stall_s)
            self.in_flight += 1
            try:
                async with RelayedUpload(self._link, header, self._store) as upload:
                    return pb.SubmitUpdateResponse(receipt=await self._parts.receive(upload, requests))
            except Decided as decided:
                return pb.SubmitUpdateResponse(receipt=decided.receipt)
            finally:
                self.in_flight -= 1

    async def QueryUpload(self, request: pb.QueryUploadRequest, context: Context) -> pb.QueryUploadResponse:
        """The offset at which to resume an upload, or its receipt."""
        del context
        answer = await self._link.query(worker_pb2.QueryForClientRequest(caller=caller_now(), request=request))
        if answer.HasField("receipt") or not answer.client_id:
            return pb.QueryUploadResponse(receipt=answer.receipt if answer.HasField("receipt") else None)
        digest, key = digest_in(request.digest, "digest"), spool_key(request.key, answer.client_id)
        kept = await self._disk.in_io(self._disk.spool.kept, key, digest)
        return pb.QueryUploadResponse(kept_bytes=max(kept, answer.kept_bytes))

    def read_part(self, message: bytes) -> Request:
        """Parse a message of SubmitUpdate. Raises InvalidInput."""
        return parse_request(message, lambda: MOST_VALUES)


async def _messages(copy: Copy, offset: int, transfer: CoordinatedTransfer) -> AsyncIterator[bytes]:
    """The messages of a resource from an offset on, with their reports."""
    places = copy.places(offset)
    for place in places:
        message, count = copy.message(place)
        transfer.check()
        if place == places[-1]:  # before: a client that has all may be gone before this goes on
            await transfer.moved(count, now=True)
            await transfer.send(worker_pb2.SendResourceRequest(complete=True))
            yield message
            return
        yield message
        del message
        await transfer.moved(count)


def handlers(service: DataService) -> grpc.GenericRpcHandler:
    """The service's methods, with the serializers of the coordinator's; the others are not served here."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "FetchModel": grpc.unary_stream_rpc_method_handler(service.FetchModel, pb.FetchModelRequest.FromString, bytes),
        "SubmitUpdate": grpc.stream_unary_rpc_method_handler(service.SubmitUpdate, service.read_part, _serialized),
        "QueryUpload": grpc.unary_unary_rpc_method_handler(
            service.QueryUpload, pb.QueryUploadRequest.FromString, _serialized
        ),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _serialized(response: Message) -> bytes:
    return response.SerializeToString()
