"""The Admin service: what operators ask for, turned into calls; no decisions."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import grpc.aio

from fl_server.admission import file_digest
from fl_server.coordinator import Coordinator
from fl_server.errors import InvalidInput
from fl_server.identity import actor
from fl_server.operators import Operators
from fl_server.parts import Parts
from fl_server.progress import Progress
from fl_server.run import Run
from fl_server.run_config import from_spec
from fl_server.store.files import disk_errors
from fl_server.views import client_evaluation, client_status, history_entry, round_summary, run_status
from protos.codec import chunk_spans, digest_message, make_chunk
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc

Context = grpc.aio.ServicerContext
SERVICE = "fl.v1.Admin"
_HISTORY_LIMIT = 1000


class AdminService(admin_pb2_grpc.AdminServicer):
    """What the `fl` command calls."""

    def __init__(self, parts: Parts, coordinator: Coordinator) -> None:
        self._parts = parts
        self._coordinator = coordinator
        self._operators = Operators(parts.ledger, parts.fleet)

    async def CreateRun(self, request: pb.CreateRunRequest, context: Context) -> pb.CreateRunResponse:
        """Check and store a run."""
        run = await self._coordinator.create(from_spec(request.spec), actor())
        return pb.CreateRunResponse(run=run_status(run))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        """All runs, oldest first."""
        return pb.ListRunsResponse(runs=[run_status(run) for run in self._coordinator.runs()])

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        """One run, with its rounds if wanted."""
        run = self._coordinator.run(request.run_id)
        rounds = run.log.commits.values() if request.with_rounds else ()
        return pb.GetRunResponse(run=run_status(run), rounds=[round_summary(commit) for commit in rounds])

    async def WatchRun(self, request: pb.WatchRunRequest, context: Context) -> AsyncIterator[pb.WatchRunResponse]:
        """The run now, then what happens, until it has ended."""
        run = self._coordinator.run(request.run_id)
        with run.watchers.watch() as events:
            yield _watched(run, Progress("snapshot"))
            if run.ended:
                return
            async for progress in events:
                yield _watched(run, progress)

    async def PauseRun(self, request: pb.PauseRunRequest, context: Context) -> pb.PauseRunResponse:
        """No new round."""
        run = self._coordinator.run(request.run_id)
        await self._coordinator.pause(run, actor())
        return pb.PauseRunResponse(run=run_status(run))

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Context) -> pb.ResumeRunResponse:
        """Rounds go on."""
        run = self._coordinator.run(request.run_id)
        await self._coordinator.resume(run, actor())
        return pb.ResumeRunResponse(run=run_status(run))

    async def ExtendRun(self, request: pb.ExtendRunRequest, context: Context) -> pb.ExtendRunResponse:
        """More rounds, more time."""
        run = self._coordinator.run(request.run_id)
        if not request.rounds and request.wall_time_s <= 0:
            raise InvalidInput("rounds", "rounds or wall_time_s over 0", "neither")
        await self._coordinator.extend(run, request.rounds, request.wall_time_s, actor())
        return pb.ExtendRunResponse(run=run_status(run))

    async def StopRun(self, request: pb.StopRunRequest, context: Context) -> pb.StopRunResponse:
        """End the run."""
        run = self._coordinator.run(request.run_id)
        await self._coordinator.stop(run, request.reason, actor())
        return pb.StopRunResponse(run=run_status(run))

    async def ListClients(self, request: pb.ListClientsRequest, context: Context) -> pb.ListClientsResponse:
        """All clients, in the order of id bytes."""
        fleet = self._parts.fleet
        return pb.ListClientsResponse(clients=[client_status(fleet, record) for record in await fleet.records()])

    async def BanClient(self, request: pb.BanClientRequest, context: Context) -> pb.BanClientResponse:
        """Refuse a client."""
        await self._operators.ban(request.client_id, request.reason, actor())
        return pb.BanClientResponse(client=self._client(request.client_id))

    async def UnbanClient(self, request: pb.UnbanClientRequest, context: Context) -> pb.UnbanClientResponse:
        """Let it back."""
        await self._operators.unban(request.client_id, actor())
        return pb.UnbanClientResponse(client=self._client(request.client_id))

    async def ReleaseClient(self, request: pb.ReleaseClientRequest, context: Context) -> pb.ReleaseClientResponse:
        """Let it be drawn before its quarantine is over."""
        await self._operators.release(request.client_id, actor())
        return pb.ReleaseClientResponse(client=self._client(request.client_id))

    async def ForgetClient(self, request: pb.ForgetClientRequest, context: Context) -> pb.ForgetClientResponse:
        """Wait for it no more."""
        await self._operators.forget(request.client_id, actor())
        return pb.ForgetClientResponse()

    async def DrainClient(self, request: pb.DrainClientRequest, context: Context) -> pb.DrainClientResponse:
        """Give it nothing new."""
        await self._operators.drain(request.client_id, request.reason, request.undo, actor())
        return pb.DrainClientResponse(client=self._client(request.client_id))

    def _client(self, client_id: str) -> pb.ClientStatus:
        return client_status(self._parts.fleet, self._parts.fleet.record(client_id))

    async def ExportModel(
        self, request: pb.ExportModelRequest, context: Context
    ) -> AsyncIterator[pb.ExportModelResponse]:
        """A committed model's safetensors file."""
        run = self._coordinator.run(request.run_id)
        round_ = await self._coordinator.model_round(run, request.round or "latest")
        path = await self._parts.in_compute(self._parts.checkpoints.model_file, run.id, round_)
        # Open from now on: a checkpoint that is pruned meanwhile can still be read to its end.
        with disk_errors(f"read {path}"):
            file = path.open("rb", buffering=0)
        with file:
            size = path.stat().st_size
            header = pb.ExportHeader(size_bytes=size, digest=digest_message(await self._parts.in_io(file_digest, path)))
            if round_ in run.log.commits:
                header.round.CopyFrom(round_summary(run.log.commits[round_]))
            yield pb.ExportModelResponse(header=header)
            for offset, length in chunk_spans(size, self._parts.config.limits.chunk_bytes):
                content = await self._parts.in_io(os.pread, file.fileno(), length, offset)
                chunk = make_chunk(content, 0, length)
                chunk.offset = offset
                yield pb.ExportModelResponse(chunk=chunk)

    async def ListEvaluations(self, request: pb.ListEvaluationsRequest, context: Context) -> pb.ListEvaluationsResponse:
        """What clients said of a committed model."""
        run = self._coordinator.run(request.run_id)
        round_ = request.round if request.HasField("round") else run.client_evaluations.newest()
        if round_ is None:
            raise InvalidInput("round", "a run whose clients were asked: evaluation.clients_every", "none was yet")
        if round_ not in run.log.commits:
            raise InvalidInput("round", f"one of the {len(run.log.commits)} committed rounds", round_)
        rows = [client_evaluation(answer) for answer in await run.client_evaluations.answers(round_)]
        return pb.ListEvaluationsResponse(round=round_summary(run.log.commits[round_]), evaluations=rows)

    async def ListHistory(self, request: pb.ListHistoryRequest, context: Context) -> pb.ListHistoryResponse:
        """Who, what, when, why."""
        store = self._parts.ledger.store
        entries = await self._parts.ledger.do(store.history, request.subject, request.limit or _HISTORY_LIMIT)
        return pb.ListHistoryResponse(entries=[history_entry(entry) for entry in entries])


def _watched(run: Run, progress: Progress) -> pb.WatchRunResponse:
    response = pb.WatchRunResponse(run=run_status(run), event=progress.event, detail=progress.detail)
    if progress.commit is not None:
        response.round.CopyFrom(round_summary(progress.commit))
    return response
