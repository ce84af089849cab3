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

from fl_server import identity
from fl_server.errors import Forbidden, NoSuchRun, Revoked
from fl_server.identity import ANYBODY, Identity
from fl_server.rpc.call_limits import ExpiringCalls
from fl_server.rpc.transfers import (
    Download,
    Reports,
    WorkerUpload,
    digest_in,
    next_report,
    report_bytes,
    resource_messages,
)
from fl_server.runs.coordinator import Coordinator
from fl_server.services import Services
from fl_server.uploads.part_receiver import Decided, spool_key
from fl_server.uploads.receiver import UploadReceiver
from protos.fl.v1 import worker_pb2 as pb
from protos.fl.v1 import worker_pb2_grpc
from protos.fl.v1.training_pb2 import Receipt, RefusalReason

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]
SERVICE = "fl.v1.Workers"


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
        who = identity.caller.get()
        gauge = self._services.metrics.workers
        # The processes of one machine or Deployment may share a certificate.
        name = request.name[:64] if who is ANYBODY else f"{who.name}/{request.name[:64]}"
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
        reports = aiter(request_iterator)
        opening = (await next_report(reports)).opening
        header = opening.header
        async with self._as_client(opening.caller):
            client = self._fleet.sessions.of_call(header.session_id).client_id
            async with self._limits.call(client, "uploads"):
                with self._fleet.sessions.transfer(header.session_id) as transfer:
                    try:
                        run = self._coordinator.run_of_call(header.key.run_id)
                        upload = await self._uploads.open(run, header, transfer)
                        opened = WorkerUpload(self._services, self._uploads, upload)
                        async for answer in opened.answers(transfer, reports):
                            yield answer
                    except NoSuchRun:
                        late = RefusalReason.REFUSAL_REASON_LATE
                        receipt = Receipt(key=header.key, digest=header.digest, reason=late, detail="no such run")
                        yield pb.ReceiveUpdateResponse(receipt=receipt)
                    except Decided as decided:
                        if decided.receipt.admitted:
                            self._fleet.sessions.update_admitted(header.session_id)
                        yield pb.ReceiveUpdateResponse(receipt=decided.receipt)

    async def SendResource(self, request_iterator: Reports, context: Context) -> AsyncIterator[pb.SendResourceResponse]:
        """Decide about a download that a worker sends."""
        reports = aiter(request_iterator)
        opening = (await next_report(reports)).opening
        session = opening.request.session_id
        async with self._as_client(opening.caller):
            client = self._fleet.sessions.of_call(session).client_id
            async with self._limits.call(client, "downloads"):
                with self._fleet.sessions.transfer(session) as transfer:
                    download = Download(self._services, self._coordinator, opening.request, transfer)
                    with download.under_way():
                        plan = pb.DownloadPlan(
                            size_bytes=download.size_bytes, report_bytes=report_bytes(self._services.config)
                        )
                        yield pb.SendResourceResponse(plan=plan)
                        while (report := await transfer.unless_ended(next_report(reports, may_end=True))) is not None:
                            download.charge(report.sent)
                            await download.sent(report.sent)
                            if report.complete:
                                download.complete()
                            yield pb.SendResourceResponse(taken=pb.ReportTaken())

    async def QueryForClient(self, request: pb.QueryForClientRequest, context: Context) -> pb.QueryForClientResponse:
        """Answer a client's QueryUpload, but for the bytes that are kept."""
        query = request.request
        async with self._as_client(request.caller):
            client = self._fleet.sessions.of_call(query.session_id).client_id
            async with self._limits.call(client, "queries"):
                run = self._coordinator.run_of_call(query.key.run_id)
                receipt, wanted = await self._uploads.query(run, query.key, client)
                if receipt is not None or not wanted:
                    return pb.QueryForClientResponse(receipt=receipt)
                kept, files = 0, self._services.files
                if files is not None:
                    digest = digest_in(query.digest)
                    name = files.name(self._services.spool.path(spool_key(query.key, client), digest))
                    await self._services.in_reads(files.learn, name)
                    kept = files.kept(name)
                return pb.QueryForClientResponse(client_id=client, kept_bytes=kept)

    async def FetchResource(
        self, request: pb.FetchResourceRequest, context: Context
    ) -> AsyncIterator[pb.FetchResourceResponse]:
        """All messages of a resource, for a worker's copy."""
        _, broadcast = self._coordinator.resource(digest_in(request.digest), "", "")
        for message in resource_messages(broadcast):
            yield pb.FetchResourceResponse(message=message)
