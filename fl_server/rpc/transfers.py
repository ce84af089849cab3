"""Transfers of clients: a download, whether this process sends its bytes or a worker, and an upload to a worker.

A download has its checks, limits and counts here. An upload that a worker receives has its call, step by step, from the
header to the receipt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import ref

import torch

from fl_common.waiting import shielded
from fl_server.admission.norms import UpdateContent
from fl_server.aggregation.outgoing import Broadcast
from fl_server.aggregation.updates import HeldUpdate
from fl_server.clients.sessions import Transfer
from fl_server.errors import InvalidInput, NoSuchResource, NotNow, UploadBroken
from fl_server.run.round_statistics import ClientTransfer, ClientTransfers
from fl_server.runs.coordinator import Coordinator
from fl_server.services import Services
from fl_server.settings.config import ServerConfig
from fl_server.store.database.store import StoredFile
from fl_server.store.errors import StoreError, StoreFull, StoreUnavailable
from fl_server.store.spool.part_file import PartBusy
from fl_server.store.spool.spool import TooManyUnfinished
from fl_server.uploads.part_receiver import BUSY_WAIT_S, Decided, spool_key, too_many_kept
from fl_server.uploads.receiver import ControlledUpload, UploadReceiver
from protos.codec import Entry, Layout, digest_bytes, digest_text, unpack
from protos.fl.v1 import coordinator_pb2, tensor_pb2
from protos.fl.v1 import worker_pb2 as pb

Reports = AsyncIterator[Any]
MOST_BUFFERS = 64 << 20
"""Bytes of an update's buffers that a worker may send."""


class Download:
    """One open download of a client."""

    def __init__(
        self,
        services: Services,
        coordinator: Coordinator,
        request: coordinator_pb2.FetchModelRequest,
        transfer: Transfer,
    ) -> None:
        """Raises InvalidInput, NoSuchResource."""
        self.digest, self._transfer = digest_in(request.digest), transfer
        self._run, broadcast = coordinator.resource(self.digest, request.run_id, transfer.client_id)
        self.size_bytes = broadcast.resource.size_bytes
        if request.offset > self.size_bytes:
            raise InvalidInput("offset", f"at most the size, {self.size_bytes}", request.offset)
        self._services, self._client, self._offset = services, transfer.client_id, request.offset
        self._limits = services.fleet.transfer_limits.of(self._client)
        self._fetch = self._limits.allowance.fetch(self.digest, len(broadcast.header) + self.size_bytes)
        self._sent, self.places = services.metrics.bytes.labels("down", broadcast.kind), broadcast.places(self._offset)
        if broadcast.kind == "model" and self._run is not None:
            self._run.rounds.bytes.download_started(self._client, self._offset)
        # A slow reader keeps no model of an earlier round in memory: its run alone does. Looked up once, for a search
        # through all runs for each message would be most of the work for a large model.
        self._kept = ref(broadcast)
        # An earlier model, which the client evaluates, is no transfer of the exchange under way.
        rounds = self._run.rounds if self._run and any(sent is broadcast for sent in self._run.model.sent) else None
        self._transfers = ClientTransfers() if rounds is None else rounds.transfers
        self._shown: ClientTransfer

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The transfer of the bytes, for tables and counts."""
        with self._transfers.transfer(self._client, "down", self.size_bytes, self._offset) as self._shown:
            yield

    def message(self, place: int) -> tuple[bytes, int]:
        """A message of the resource, and its tensor bytes. Raises NoSuchResource if no run sends it any more."""
        if (broadcast := self._kept()) is None:
            raise NoSuchResource(digest_text(self.digest))
        return broadcast.message(place)

    def charge(self, count: int, overhead: int = 0) -> None:
        """So many bytes are about to be sent. overhead: of a message without any. Raises what ends the download."""
        self._transfer.check()
        if excess := self._fetch.send(count or overhead, time.monotonic()):
            raise self._services.fleet.transfer_limits.exceeded(self._client, excess)
        self._shown.done += count  # before: a client that has all may be gone before this goes on

    def complete(self) -> None:
        """The last message is about to be sent."""
        self._transfer.resource_sent(self.digest)

    async def sent(self, count: int) -> None:
        """So many bytes have gone. Returns when the next ones may go."""
        self._sent.inc(count)
        if self._run is not None:
            self._run.rounds.bytes.total_down += count
        await self._limits.pace(count)


def resource_messages(broadcast: Broadcast) -> Iterator[bytes]:
    """All messages of a resource."""
    for place in broadcast.places(0):
        yield broadcast.message(place)[0]


def digest_in(message: tensor_pb2.Digest) -> bytes:
    """The digest in a request. Raises InvalidInput."""
    try:
        return digest_bytes(message)
    except ValueError as error:
        raise InvalidInput("digest", "a BLAKE3-256 digest", str(error)) from error


class WorkerUpload:
    """An upload that is open at a worker."""

    def __init__(self, services: Services, uploads: UploadReceiver, upload: ControlledUpload) -> None:
        self._services, self._uploads, self._upload = services, uploads, upload
        self._limits = services.fleet.transfer_limits
        self._key = spool_key(upload.header.key, upload.client)
        self._digest = digest_bytes(upload.header.digest)

    async def answers(self, transfer: Transfer, reports: Reports) -> AsyncIterator[pb.ReceiveUpdateResponse]:
        """The answers to a worker. Raises Decided at the end."""
        upload = self._upload
        await self._reserve()
        try:
            with self._uploads.counted():
                plan = _plan(upload, report_bytes(self._services.config))
                if (files := self._services.files) is not None:
                    plan.parts.extend(files.to_continue(self._name))
                yield pb.ReceiveUpdateResponse(plan=plan)
                buffers = bytearray()
                with upload.under_way():
                    while not (report := await transfer.unless_ended(next_report(reports))).HasField("content"):
                        if report.HasField("buffers") and len(buffers) + len(report.buffers) <= MOST_BUFFERS:
                            buffers += report.buffers
                            continue
                        await self._progress(report)
                        yield pb.ReceiveUpdateResponse(taken=pb.ReportTaken())
                content = UpdateContent(report.content.digest, report.content.squares, report.content.wrong)
                if plan.digest_only:
                    upload.check_digest(content.digest)
                else:
                    await upload.check_content(content, SentBuffers(upload.gate.buffers_sent, buffers))
                yield pb.ReceiveUpdateResponse(seal=pb.UploadSeal())
                report = await transfer.unless_ended(next_report(reports))
                await self._placed(report)
                if plan.digest_only:
                    await self._read_here()
                raise Decided(await upload.admit())
        except UploadBroken as broken:
            if not broken.kept_bytes:
                await self._forget_parts()
            raise
        except Decided as decided:
            if not decided.keeps(upload.header):
                await self._forget_parts()
            raise
        finally:
            await self._free()

    async def _free(self) -> None:
        """Let others write the file. A worker may have opened its own after the files of an ended run were removed."""
        services, key = self._services, self._key
        services.spool.free(key)
        if self._upload.is_over():
            await shielded(services.in_io(services.spool.remove_run, key.run_id))

    @property
    def _name(self) -> str:
        """The name of the update in the object store."""
        files = self._services.files
        return "" if files is None else files.name(self._services.spool.path(self._key, self._digest))

    async def _forget_parts(self) -> None:
        """Have the parts removed that a worker has put of an update which does not count."""
        if (files := self._services.files) is not None:
            with suppress(StoreUnavailable):  # they are found at the end of the round
                await self._services.in_io(files.learn, self._name)
            await self._services.in_io(files.remove_file, self._name)

    async def _reserve(self) -> None:
        """Let the worker write the part file. Raises what `PartReceiver` raises for one that cannot be written."""
        services, upload, key = self._services, self._upload, self._key
        try:
            if services.files is not None:
                await services.in_io(services.files.learn, self._name)
        except StoreError as error:
            raise Decided(await upload.failed(error)) from error
        size, disk = upload.header.size_bytes, self._uploads.disk
        reserving = asyncio.ensure_future(
            disk.of_client(upload.client, services.spool.reserve, key, self._digest, size, upload.is_over)
        )
        try:
            await shielded(reserving)
        except PartBusy as busy:
            raise NotNow("an older stream of this update is still open", BUSY_WAIT_S) from busy
        except TooManyUnfinished as held:
            raise too_many_kept(services.config, self._limits, upload.client) from held
        except StoreError as error:
            raise Decided(await upload.failed(error)) from error
        except asyncio.CancelledError:
            # The thread reserves it anyway.

            def free(made: asyncio.Future[None]) -> None:
                if not made.cancelled() and made.exception() is None:
                    services.spool.free(key)

            reserving.add_done_callback(free)
            raise

    async def _progress(self, report: pb.ReceiveUpdateRequest) -> None:
        """Take a report before the content. Raises Decided for the failure of an update that is not wanted any more."""
        upload = self._upload
        if report.HasField("failure"):
            kind = StoreFull if report.failure.is_full else StoreError
            raise Decided(await upload.failed(kind(f"a worker could not write: {report.failure.why[:500]}")))
        if not report.HasField("written"):
            raise InvalidInput("part", "a report of the bytes written", report.WhichOneof("part") or "nothing")
        upload.check()
        upload.wrote(report.written)
        await upload.advance(report.written)

    async def _placed(self, report: pb.ReceiveUpdateRequest) -> None:
        """The file has its final name. With an object store its parts count from now on."""
        if not report.HasField("place"):
            await self._progress(report)
            raise InvalidInput("part", "the place of the update", "written")
        if (files := self._services.files) is None:
            return
        place, size = report.place, self._upload.header.size_bytes
        if place.part_bytes != files.part_bytes or len(place.parts) != -(-size // files.part_bytes):
            expected = f"all parts of {files.part_bytes} bytes in the object store"
            raise InvalidInput("place", expected, f"{len(place.parts)} of {place.part_bytes} bytes")
        stored = StoredFile(self._name, size, self._digest, place.part_bytes, tuple(place.parts))
        await self._services.in_io(files.count, [stored])

    async def _read_here(self) -> None:
        """Check the values of an update here, because a worker does not know all of them."""
        services, upload = self._services, self._upload
        path = services.spool.path(self._key, self._digest)
        if (files := services.files) is not None and (stored := files.find(files.name(path))) and not path.exists():
            await services.in_io(files.fetch, stored, path)
        await upload.check_content(await services.in_io(upload.read, path), path)


def report_bytes(config: ServerConfig) -> int:
    """Bytes after which a worker reports the progress of a transfer."""
    most = int(config.workers.report_mib * (1 << 20)) if config.workers is not None else 1 << 20
    rate = int(config.transfers.bytes_per_s)
    return max(1, min(most, rate)) if rate else most


class SentBuffers(HeldUpdate):
    """The buffers of an update that a worker has read; the rest of the update is not here."""

    def __init__(self, entries: list[Entry], data: bytearray) -> None:
        """entries: in the order of the bytes. Raises InvalidInput for another number of bytes."""
        self._starts: dict[int, int] = {}
        at = 0
        for entry in entries:
            self._starts[entry.offset] = at
            at += entry.nbytes
        if at != len(data):
            raise InvalidInput("buffers", f"{at} bytes", len(data))
        self._data = memoryview(data)

    @property
    def device(self) -> torch.device:
        """See HeldUpdate."""
        return torch.device("cpu")

    def read(self, entry: Entry, start: int, count: int) -> torch.Tensor:
        """See HeldUpdate."""
        size = entry.dtype.itemsize
        first = self._starts[entry.offset] + start * size
        block = Entry(entry.name, entry.dtype, (count,), 0, entry.trainable)
        return unpack(self._data[first : first + count * size], Layout((block,), block.nbytes))[entry.name]


def _plan(upload: ControlledUpload, most_bytes: int) -> pb.UploadPlan:
    """What a worker needs for the check of an update."""
    shape = upload.gate.shape_read
    plan = pb.UploadPlan(report_bytes=most_bytes, client_id=upload.client)
    if shape is None:
        return plan
    for payload in shape.payloads:
        encoding, manifest = payload.encoding, payload.layout.to_manifest()
        plan.payloads.add(
            payload=payload.payload, manifest=manifest, encoding=encoding.name, fraction=encoding.fraction
        )
    if not shape.plain:
        keys, known = upload.gate.decoding(upload.header.num_steps)
        plan.keys.extend(keys.of_payload(payload.payload) for payload in shape.payloads)
        plan.digest_only = known is not None
    return plan


async def next_report(reports: Reports, *, may_end: bool = False) -> Any:
    """The next report of a worker. Raises NotNow if it has ended its call, unless it may."""
    report = await anext(reports, None)
    if report is None and not may_end:
        raise NotNow("a worker ended the transfer", BUSY_WAIT_S, routine=True)
    return report
