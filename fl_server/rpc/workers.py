"""The Workers service: transfers of clients whose bytes a worker moves. Everything about them is decided here.

A call of a worker for a client runs as that client: its certificate, session, limits and errors are the client's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import structlog
import torch

from fl_server import identity
from fl_server.admission.reading import UpdateContent
from fl_server.aggregation.updates import HeldUpdate
from fl_server.clients.sessions import Transfer
from fl_server.errors import Forbidden, InvalidInput, NoSuchRun, NotNow, Revoked
from fl_server.identity import ANYBODY, Identity
from fl_server.rpc.downloads import Download, digest_in, resource_messages
from fl_server.rpc.open_calls import ExpiringCalls
from fl_server.runs.coordinator import Coordinator
from fl_server.services import Services
from fl_server.store.database.ledger_objects import StoredFile
from fl_server.store.errors import StoreError, StoreFull
from fl_server.store.spool.part_file import PartBusy
from fl_server.store.spool.spool import TooManyUnfinished
from fl_server.uploads.open_upload import Decided
from fl_server.uploads.part_receiver import BUSY_WAIT_S, spool_key, too_many_kept
from fl_server.uploads.receiver import ControlledUpload, UploadReceiver
from protos.codec import Entry, Layout, digest_bytes, unpack
from protos.fl.v1 import worker_pb2 as pb
from protos.fl.v1 import worker_pb2_grpc
from protos.fl.v1.training_pb2 import Receipt, RefusalReason

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]
Reports = AsyncIterator[Any]
SERVICE = "fl.v1.Workers"
MOST_BUFFERS = 64 << 20
"""Bytes of an update's buffers that a worker sends; of more, only files in this process are checked."""


class WorkersService(worker_pb2_grpc.WorkersServicer):
    """The methods that workers call."""

    def __init__(self, services: Services, coordinator: Coordinator, uploads: UploadReceiver) -> None:
        self._services, self._coordinator, self._uploads = services, coordinator, uploads
        self._fleet = services.fleet
        self._limits = services.fleet.transfer_limits
        self._clients = ExpiringCalls()
        """Calls by the clients' certificates, not the workers'."""
        services.revocations.on_change.append(self._end_denied)

    def _end_denied(self) -> None:
        self._clients.end_denied(self._services.revocations)

    async def Serve(self, request: pb.ServeRequest, context: Context) -> AsyncIterator[pb.ServeResponse]:
        """Tell a worker what it needs, and count it for as long as it is there."""
        del context
        who = identity.caller.get()
        name, gauge = request.name[:64] if who is ANYBODY else who.name, self._services.metrics.workers
        gauge.inc()
        log.info("worker_attached", worker=name, address=identity.address.get(), software=request.software[:64])
        try:
            yield self._terms()
            await asyncio.get_running_loop().create_future()
        finally:
            gauge.dec()
            log.info("worker_gone", worker=name)

    def _terms(self) -> pb.ServeResponse:
        ledger, files = self._services.ledger.store, self._services.files
        return pb.ServeResponse(
            coordinator_id=ledger.coordinator_id,
            objects="" if files is None else ledger.coordinator_id,
            epoch=0 if files is None else files.epoch,
        )

    @asynccontextmanager
    async def _as_client(self, said: pb.Caller) -> AsyncIterator[None]:
        """Run a call as the client for which a worker makes it. Raises what the client's own call would raise."""
        who = ANYBODY
        if said.role:
            who = Identity(said.role, said.name, said.ends or None, said.begins, said.serial, said.key)
        identity.caller.set(who)
        identity.address.set(said.address[:64])
        who.check_time()
        if why := self._services.revocations.denied(who):
            raise Revoked(str(who), why)
        if who is not ANYBODY:
            if who.role != "client":
                raise Forbidden(str(who), "the role client", ("client",))
            self._fleet.records.refuse_holder(who)
        with self._clients.while_valid(who):
            yield

    async def ReceiveUpdate(
        self, request_iterator: Reports, context: Context
    ) -> AsyncIterator[pb.ReceiveUpdateResponse]:
        """Decide about an update that a worker receives."""
        del context
        reports = aiter(request_iterator)
        opening = (await _next(reports)).opening
        header = opening.header
        async with self._as_client(opening.caller):
            client = self._fleet.sessions.of_call(header.session_id).client_id
            async with self._limits.call(client, "uploads"):
                with self._fleet.sessions.transfer(header.session_id) as transfer:
                    try:
                        run = self._coordinator.run(header.key.run_id)
                        upload = await self._uploads.open(run, header, transfer)
                        async for answer in self._decided(upload, transfer, reports):
                            yield answer
                    except NoSuchRun:
                        late = RefusalReason.REFUSAL_REASON_LATE
                        receipt = Receipt(key=header.key, digest=header.digest, reason=late, detail="no such run")
                        yield pb.ReceiveUpdateResponse(receipt=receipt)
                    except Decided as decided:
                        if decided.receipt.admitted:
                            self._fleet.update_admitted(header.session_id)
                        yield pb.ReceiveUpdateResponse(receipt=decided.receipt)

    async def _decided(
        self, upload: ControlledUpload, transfer: Transfer, reports: Reports
    ) -> AsyncIterator[pb.ReceiveUpdateResponse]:
        """The answers to a worker. Raises Decided at the end."""
        await self._reserve(upload)
        try:
            with self._uploads.counted():
                plan = _plan(upload, self._report_bytes)
                yield pb.ReceiveUpdateResponse(plan=plan)
                buffers = bytearray()
                with upload.under_way():
                    while not (report := await transfer.unless_ended(_next(reports))).HasField("content"):
                        if report.HasField("buffers") and len(buffers) + len(report.buffers) <= MOST_BUFFERS:
                            buffers += report.buffers
                            continue
                        await self._progress(upload, report)
                        yield pb.ReceiveUpdateResponse(taken=pb.ReportTaken())
                content = UpdateContent(report.content.digest, report.content.squares, report.content.wrong)
                if plan.digest_only:
                    upload.check_digest(content.digest)
                else:
                    await upload.check_content(content, SentBuffers(upload.gate.buffers_sent, buffers))
                yield pb.ReceiveUpdateResponse(seal=pb.UploadSeal())
                report = await transfer.unless_ended(_next(reports))
                await self._placed(upload, report)
                if plan.digest_only:
                    await self._read_here(upload)
                raise Decided(await upload.admit())
        finally:
            self._services.spool.free(spool_key(upload.header.key, upload.client))

    @property
    def _report_bytes(self) -> int:
        config = self._services.config
        most = int(config.workers.report_mib * (1 << 20)) if config.workers is not None else 1 << 20
        rate = int(config.transfers.bytes_per_s)
        return max(1, min(most, rate)) if rate else most

    async def _reserve(self, upload: ControlledUpload) -> None:
        """Let the worker write the part file. Raises what `PartReceiver` raises for one that cannot be written."""
        services, header = self._services, upload.header
        key, digest = spool_key(header.key, upload.client), digest_bytes(header.digest)
        reserving = asyncio.ensure_future(
            self._uploads.disk.of_client(upload.client, services.spool.reserve, key, digest, header.size_bytes)
        )
        try:
            await asyncio.shield(reserving)
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

    async def _progress(self, upload: ControlledUpload, report: pb.ReceiveUpdateRequest) -> None:
        """Take a report before the content. Raises Decided for the failure of an update that is not wanted any more."""
        if report.HasField("failure"):
            kind = StoreFull if report.failure.is_full else StoreError
            raise Decided(await upload.failed(kind(f"a worker could not write: {report.failure.why[:500]}")))
        if not report.HasField("written"):
            raise InvalidInput("part", "a report of the bytes written", report.WhichOneof("part") or "nothing")
        upload.check()
        upload.wrote(report.written)
        await upload.advance(report.written)

    async def _placed(self, upload: ControlledUpload, report: pb.ReceiveUpdateRequest) -> None:
        """The file has its final name. With an object store its parts count from now on."""
        if not report.HasField("place"):
            await self._progress(upload, report)
            raise InvalidInput("part", "the place of the update", "written")
        services, header = self._services, upload.header
        if (files := services.files) is None:
            return
        digest = digest_bytes(header.digest)
        name = files.name(services.spool.path(spool_key(header.key, upload.client), digest))
        place = report.place
        stored = StoredFile(name, header.size_bytes, digest, place.part_bytes, tuple(place.parts))
        await services.in_io(files.count, [stored])

    async def _read_here(self, upload: ControlledUpload) -> None:
        """Check the values of an update here, because a worker does not know all of them."""
        services, header = self._services, upload.header
        path = services.spool.path(spool_key(header.key, upload.client), digest_bytes(header.digest))
        if (files := services.files) is not None and (stored := files.find(files.name(path))) and not path.exists():
            await services.in_io(files.fetch, stored, path)
        await upload.check_content(await services.in_io(upload.read, path), path)

    async def SendResource(self, request_iterator: Reports, context: Context) -> AsyncIterator[pb.SendResourceResponse]:
        """Decide about a download that a worker sends."""
        del context
        reports = aiter(request_iterator)
        opening = (await _next(reports)).opening
        session = opening.request.session_id
        async with self._as_client(opening.caller):
            client = self._fleet.sessions.of_call(session).client_id
            async with self._limits.call(client, "downloads"):
                with self._fleet.sessions.transfer(session) as transfer:
                    download = Download(self._services, self._coordinator, opening.request, transfer)
                    with download.under_way():
                        plan = pb.DownloadPlan(size_bytes=download.size_bytes, report_bytes=self._report_bytes)
                        yield pb.SendResourceResponse(plan=plan)
                        while (report := await transfer.unless_ended(_next(reports, may_end=True))) is not None:
                            download.charge(report.sent)
                            await download.sent(report.sent)
                            if report.complete:
                                download.complete()
                            yield pb.SendResourceResponse(taken=pb.ReportTaken())

    async def QueryForClient(self, request: pb.QueryForClientRequest, context: Context) -> pb.QueryForClientResponse:
        """Answer a client's QueryUpload, but for the bytes that are kept."""
        del context
        query = request.request
        async with self._as_client(request.caller):
            client = self._fleet.sessions.of_call(query.session_id).client_id
            async with self._limits.call(client, "queries"):
                run = self._coordinator.run(query.key.run_id)
                receipt, wanted = await self._uploads.query(run, query.key, client)
                return pb.QueryForClientResponse(receipt=receipt, client_id=client if wanted else "")

    async def FetchResource(
        self, request: pb.FetchResourceRequest, context: Context
    ) -> AsyncIterator[pb.FetchResourceResponse]:
        """All messages of a resource, for a worker's copy."""
        del context
        _, broadcast = self._coordinator.resource(digest_in(request.digest, "digest"), "", "")
        for message in resource_messages(broadcast):
            yield pb.FetchResourceResponse(message=message)


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


def _plan(upload: ControlledUpload, report_bytes: int) -> pb.UploadPlan:
    """What a worker needs for the check of an update."""
    shape = upload.gate.shape_read
    plan = pb.UploadPlan(report_bytes=report_bytes, client_id=upload.client)
    if shape is None:
        return plan
    for payload in shape.payloads:
        plan.payloads.add(
            payload=payload.payload,
            manifest=payload.layout.to_manifest(),
            encoding=payload.encoding.name,
            fraction=payload.encoding.fraction,
        )
    if not shape.plain:
        keys, known = upload.gate.decoding(upload.header.num_steps)
        plan.keys.extend(keys.of_payload(payload.payload) for payload in shape.payloads)
        plan.digest_only = known is not None
    return plan


async def _next(reports: Reports, *, may_end: bool = False) -> Any:
    """The next report of a worker. Raises NotNow if it has ended its call, unless it may."""
    report = await anext(reports, None)
    if report is None and not may_end:
        raise NotNow("a worker ended the transfer", BUSY_WAIT_S, routine=True)
    return report
