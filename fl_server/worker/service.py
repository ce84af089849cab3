"""The methods of the Coordinator service that a worker serves, and its machine's copies of what clients fetch.

The methods are those that move the bytes of models and updates. A copy is a file with the messages of one resource as
they go to clients, each behind its length; the workers of a machine share it. It is written beside its place and
renamed, so it is whole or not there. Clients check every chunk and the whole: a damaged copy is noticed there.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from fl_common.files import make_folders
from fl_common.waiting import shielded
from fl_server.rpc.call_limits import parse_request
from fl_server.rpc.service import SERVICE, holder_of, method, read_header, serialized
from fl_server.rpc.transfers import digest_in
from fl_server.store.errors import disk_errors
from fl_server.uploads.part_receiver import Decided, Disk, PartReceiver, spool_key
from fl_server.uploads.stream import Request, Requests
from fl_server.worker.link import CoordinatedTransfer, EarlyAnswer, Link, caller_now, error_of
from fl_server.worker.upload import RelayedUpload, Store, WorkerFiles
from protos.chunks import read_chunk
from protos.codec import digest_message
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import worker_pb2

_LENGTH = struct.Struct("<Q")
OPEN = 16
"""Copies that are open; the least recently used is closed first, unless a download reads it."""
RECENT = 4
"""Messages of a copy that are kept: clients that fetch at the same time share them."""
Context = grpc.aio.ServicerContext[Any, Any]
MOST_VALUES = 1 << 18
"""Values in a header. The coordinator compares it with what it expects."""


class Copy:
    """One resource."""

    def __init__(self, path: Path) -> None:
        with disk_errors(f"open {path}"), path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._spans = list(_spans(self._map))
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        first = read_chunk(self.message(1)[0]) if len(self._spans) > 1 else None
        self._chunk_bytes = len(first.data) if first is not None else 1

    def places(self, offset: int) -> range | tuple[int, ...]:
        """Positions of the messages to send: the header, and the chunks from the last chunk border up to `offset`."""
        return (0, *range(1 + offset // self._chunk_bytes, len(self._spans)))

    def message(self, place: int) -> tuple[bytes, int]:
        """An encoded message, and its number of tensor bytes (0 for the header)."""
        message = self._recent.get(place)
        if message is None:
            start, end = self._spans[place]
            message = self._recent[place] = self._map[start:end]
            if len(self._recent) > RECENT:
                self._recent.popitem(last=False)
        chunk = read_chunk(message) if place else None
        return message, 0 if chunk is None else len(chunk.data)


def _spans(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        yield at, at + length
        at += length


class Copies:
    """The copies of one machine. Lives on the event loop of a worker; files are shared with other workers."""

    def __init__(self, link: Link, folder: Path, most_bytes: int) -> None:
        self._link, self._folder, self._most = link, folder, most_bytes
        self._open: OrderedDict[bytes, Copy] = OrderedDict()
        self._fetching: dict[bytes, asyncio.Task[Copy]] = {}

    async def of(self, digest: bytes) -> Copy:
        """The copy of a resource, made if it is not there yet. Raises the error for the client."""
        if (copy := self._open.get(digest)) is not None:
            self._open.move_to_end(digest)
            return copy
        if (fetching := self._fetching.get(digest)) is None:
            fetching = self._fetching[digest] = asyncio.create_task(self._fetched(digest))
            fetching.add_done_callback(lambda _: self._fetching.pop(digest, None))
        copy = await shielded(fetching)
        self._open[digest] = copy
        while len(self._open) > OPEN:
            self._open.popitem(last=False)
        return copy

    async def _fetched(self, digest: bytes) -> Copy:
        path = self._folder / digest.hex()
        if not path.exists():
            await self._fetch(digest, path)
        return await asyncio.to_thread(Copy, path)

    async def _fetch(self, digest: bytes, path: Path) -> None:
        """Write the file. Several workers may do so at the same time: each has its own until it is renamed."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with disk_errors(f"write {path}"):
            make_folders(self._folder, durable=False)
        call = self._link.resource(worker_pb2.FetchResourceRequest(digest=digest_message(digest)))
        try:
            with disk_errors(f"write {path}"), temporary.open("wb") as file:
                async for piece in call:
                    await asyncio.to_thread(file.writelines, (_LENGTH.pack(len(piece.message)), piece.message))
            with disk_errors(f"write {path}"):
                temporary.replace(path)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()
            temporary.unlink(missing_ok=True)
        await asyncio.to_thread(self._make_room, path)

    def _make_room(self, newest: Path) -> None:
        """Remove the oldest files over the limit. One that is open can be read until it is closed."""
        with disk_errors(f"make room in {self._folder}"):
            files = [(path.stat().st_mtime, path.stat().st_size, path) for path in self._folder.iterdir()]
            total = sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if total > self._most and path != newest:
                    path.unlink(missing_ok=True)
                    total -= size


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
        digest = digest_in(request.digest)
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
        answer = await self._link.query(worker_pb2.QueryForClientRequest(caller=caller_now(), request=request))
        if answer.HasField("receipt") or not answer.client_id:
            return pb.QueryUploadResponse(receipt=answer.receipt if answer.HasField("receipt") else None)
        digest, key = digest_in(request.digest), spool_key(request.key, answer.client_id)
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
        "SubmitUpdate": grpc.stream_unary_rpc_method_handler(service.SubmitUpdate, service.read_part, serialized),
        "QueryUpload": method(grpc.unary_unary_rpc_method_handler, service.QueryUpload, pb.QueryUploadRequest),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)
