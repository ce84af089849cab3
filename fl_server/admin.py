"""The Admin service: what operators ask for, turned into calls; no decisions."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator

import grpc.aio

from fl_server.admission import file_digest
from fl_server.clients.details import client_details, work_of
from fl_server.coordinator import Coordinator
from fl_server.errors import InvalidInput
from fl_server.identity import actor
from fl_server.operators import Operators
from fl_server.parts import Parts
from fl_server.progress import Progress
from fl_server.run import Run
from fl_server.run_config import from_spec
from fl_server.store.checkpoints import INITIAL
from fl_server.store.files import disk_errors
from fl_server.views import (
    client_evaluation,
    client_status,
    history_entry,
    not_loaded_status,
    round_summary,
    run_status,
    runs_listed,
)
from protos.codec import chunk_spans, digest_message, digest_text, make_chunk
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc

Context = grpc.aio.ServicerContext
SERVICE = "fl.v1.Admin"
_HISTORY_LIMIT, _HISTORY_MOST = 1000, 10_000
_SUBJECT_CHARS = 256
"""More than an id has."""
_SHOWN_HISTORY = 10


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
        runs, not_loaded = self._coordinator.runs(), self._coordinator.not_loaded
        return pb.ListRunsResponse(runs=runs_listed(runs, not_loaded.all()))

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        """One run, with its rounds if wanted."""
        if (problem := self._coordinator.not_loaded.get(request.run_id)) is not None:
            return pb.GetRunResponse(run=not_loaded_status(problem))
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
        await self._coordinator.resume(run, actor(), _rate(request))
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

    async def GetClient(self, request: pb.GetClientRequest, context: Context) -> pb.GetClientResponse:
        """One client, with who speaks for it and what happened to it."""
        parts, client_id = self._parts, request.client_id
        known = parts.fleet.record(client_id)
        counted = await parts.ledger.do(parts.ledger.store.client, client_id)
        entries = await parts.ledger.do(parts.ledger.store.history, client_id, request.history or _SHOWN_HISTORY)
        response = client_details(parts.fleet, counted or known, entries)
        response.work = work_of(self._coordinator, client_id, response.client.run_id)
        return response

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
        banned = await self._operators.forget(request.client_id, actor())
        return pb.ForgetClientResponse(still_banned=banned)

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
            digest = await self._parts.in_io(file_digest, path)
            what = (
                f"{'the first model' if round_ == INITIAL else f'round {round_}'}, {digest_text(digest)}, {size} bytes"
            )
            await self._coordinator.audit.model_exported(actor(), run.id, what)
            header = pb.ExportHeader(size_bytes=size, digest=digest_message(digest))
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
        if request.limit > _HISTORY_MOST:
            raise InvalidInput("limit", f"at most {_HISTORY_MOST:,} entries", f"{request.limit:,}")
        store, subject = self._parts.ledger.store, request.subject[:_SUBJECT_CHARS]
        entries = await self._parts.ledger.do(store.history, subject, request.limit or _HISTORY_LIMIT)
        return pb.ListHistoryResponse(entries=[history_entry(entry) for entry in entries])


def _rate(request: pb.ResumeRunRequest) -> float:
    """The learning rate that a resumed run gets; 0: as it was. Raises InvalidInput."""
    if not request.HasField("learning_rate"):
        return 0.0
    if not 0 < request.learning_rate < math.inf:
        raise InvalidInput("learning_rate", "a number over 0", request.learning_rate)
    return request.learning_rate


def _watched(run: Run, progress: Progress) -> pb.WatchRunResponse:
    response = pb.WatchRunResponse(run=run_status(run), event=progress.event, detail=progress.detail)
    if progress.commit is not None:
        response.round.CopyFrom(round_summary(progress.commit))
    return response
