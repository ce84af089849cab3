"""The Admin service: turns operators' messages into calls of the coordinator, and results into messages."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc.aio

from fl_server.audit.calls import audit_page
from fl_server.enrollment.calls import EnrollmentCalls
from fl_server.enrollment.issuing import Authorities
from fl_server.errors import InvalidInput, NotConfigured
from fl_server.identity import ANYBODY, actor, caller
from fl_server.rpc.access import with_floor, with_owner
from fl_server.rpc.clients import ClientCalls
from fl_server.rpc.lists import HistoryCalls, ListCalls
from fl_server.rpc.methods import methods_of, ordered
from fl_server.rpc.models import InitialModels, ModelExports
from fl_server.rpc.overview import OverviewCalls
from fl_server.rpc.releases import ReleaseCalls
from fl_server.rpc.views import add_leadership, not_loaded_status, round_summary, run_status
from fl_server.run.progress import Progress
from fl_server.run.run import Run
from fl_server.run_settings.spec import from_spec
from fl_server.runs.coordinator import Coordinator
from fl_server.services import Services
from fl_server.store.records import CommitRecord
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc
from protos.wire import timestamp

Context = grpc.aio.ServicerContext[Any, Any]
SERVICE = "fl.v1.Admin"


_ROUNDS_AT_ONCE = 100
"""Missed rounds that are read at once."""


class AdminService(
    ListCalls, HistoryCalls, ClientCalls, OverviewCalls, ReleaseCalls, EnrollmentCalls, admin_pb2_grpc.AdminServicer
):
    """The methods that the `fl` command calls: here those for runs, models, authorities and the caller."""

    def __init__(self, services: Services, coordinator: Coordinator) -> None:
        super().__init__(services, coordinator)
        ledger, issuer, revocations = services.ledger, services.issuer, services.revocations
        EnrollmentCalls.__init__(self, services.config, ledger, issuer, revocations, services.addresses)
        self._exports = ModelExports(services, coordinator)
        self._initial_models = InitialModels(services, self._runs, self._exports)
        clients = services.fleet.records.in_memory()
        self._authorities = Authorities(ledger, services.pem_files, issuer, revocations, clients)

    async def CreateRun(self, request: pb.CreateRunRequest, context: Context) -> pb.CreateRunResponse:
        """Check a run's configuration, and create the run."""
        config = with_floor(with_owner(from_spec(request.spec)), self._services.config.rounds)
        start = await self._initial_models.opened(config.initial_model)
        run = await self._coordinator.creation.create(config, actor(), start)
        return pb.CreateRunResponse(run=run_status(run), remarks=run.model.engine.remarks)

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        """One run, with its rounds if requested."""
        if (problem := self._runs.problem(request.run_id)) is not None:
            return pb.GetRunResponse(run=not_loaded_status(problem))
        run = self._runs.get(request.run_id)
        rounds = await self._all_rounds(run) if request.with_rounds else []
        if run.account is not None:
            await self._services.second.settled(run.id, run.account.question(run.state.draws))
        return pb.GetRunResponse(run=run_status(run), rounds=rounds)

    async def WatchRun(self, request: pb.WatchRunRequest, context: Context) -> AsyncIterator[pb.WatchRunResponse]:
        """Rounds that the caller missed, the run now, and then its events until it has ended."""
        run = self._runs.get(request.run_id)
        hidden = run.context.hides_cohorts
        with run.watchers.watch() as events:
            committed = run.rounds.committed  # later ones come as events
            if request.HasField("first_round"):
                async for commit in self._commits(run.id, request.first_round, committed):
                    missed = pb.WatchRunResponse(event="committed_before", round=round_summary(commit, hidden=hidden))
                    missed.run.run_id = run.id
                    yield missed
            yield _watch_response(run, Progress("snapshot"))
            if run.ended:
                return
            async for progress in events:
                yield progress.shown(partial(_watch_response, run, progress))

    async def _commits(self, run_id: str, first: int, end: int) -> AsyncIterator[CommitRecord]:
        """The committed rounds from `first` on, before `end`, from the ledger."""
        ledger = self._services.ledger
        while first < end:
            commits = await ledger.do(ledger.store.commits, run_id, first, min(_ROUNDS_AT_ONCE, end - first))
            for commit in commits:
                yield commit
            if not commits:
                return
            first = commits[-1].round + 1

    async def PauseRun(self, request: pb.PauseRunRequest, context: Context) -> pb.PauseRunResponse:
        """Start no new round."""
        run = self._runs.to_change(request.run_id)
        await self._coordinator.actions.pause(run, actor())
        return pb.PauseRunResponse(run=run_status(run))

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Context) -> pb.ResumeRunResponse:
        """Start new rounds again."""
        run = await self._to_continue(request.run_id)
        await self._coordinator.actions.resume(run, actor(), _rate(request))
        return pb.ResumeRunResponse(run=run_status(run))

    async def ExtendRun(self, request: pb.ExtendRunRequest, context: Context) -> pb.ExtendRunResponse:
        """Give the run more rounds or more time."""
        run = await self._to_continue(request.run_id)
        if not request.rounds and request.wall_time_s <= 0:
            raise InvalidInput("rounds", "rounds or wall_time_s over 0", "neither")
        await self._coordinator.actions.extend(run, request.rounds, request.wall_time_s, actor())
        return pb.ExtendRunResponse(run=run_status(run))

    async def _to_continue(self, run_id: str) -> Run:
        """A run that the caller may change; one whose code failed at a start is loaded again."""
        self._runs.require_change(run_id)
        await self._coordinator.restoration.load_again(run_id)
        return self._runs.to_change(run_id)

    async def StopRun(self, request: pb.StopRunRequest, context: Context) -> pb.StopRunResponse:
        """End the run."""
        run = self._runs.to_change(request.run_id)
        await self._coordinator.actions.stop(run, request.reason, actor())
        return pb.StopRunResponse(run=run_status(run))

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: Context) -> pb.DeleteRunResponse:
        """Remove a run that has ended."""
        self._runs.require_change(request.run_id)
        finished = await self._coordinator.deletions.delete(request.run_id, request.reason, actor())
        return pb.DeleteRunResponse(finished=finished)

    async def ExportModel(
        self, request: pb.ExportModelRequest, context: Context
    ) -> AsyncIterator[pb.ExportModelResponse]:
        """A committed model as a safetensors file."""
        run = self._runs.to_change(request.run_id)
        async with aclosing(self._exports.messages(run, request.round or "latest", request.model)) as messages:
            async for message in messages:
                yield message

    async def UploadModel(
        self, request_iterator: AsyncIterator[pb.UploadModelRequest], context: Context
    ) -> pb.UploadModelResponse:
        """Receive a model that a run of the caller may start from."""
        return pb.UploadModelResponse(initial_model=await self._initial_models.receive(aiter(request_iterator)))

    async def WhoAmI(self, request: pb.WhoAmIRequest, context: Context) -> pb.WhoAmIResponse:
        """The caller. One without an identity may call everything here, or would not have come this far."""
        who = caller.get()
        response = pb.WhoAmIResponse(
            identity=who.role if who is ANYBODY else str(who),
            roles=["admin"] if who is ANYBODY else ordered(who.roles),
            source=who.source,
            methods=methods_of(who),
            ends=None if who.ends is None else timestamp(who.ends),
        )
        add_leadership(self._services.leading, response)
        return response

    async def CreateWebLink(self, request: pb.CreateWebLinkRequest, context: Context) -> pb.CreateWebLinkResponse:
        """A link with which the caller's browser gets the caller's identity, to read only."""
        web, who = self._services.web, caller.get()
        if not web.url:
            raise NotConfigured("the web page", "web_listen")
        if who is ANYBODY:
            return pb.CreateWebLinkResponse(url=f"{web.url}/")
        link = web.link(who)
        return pb.CreateWebLinkResponse(url=f"{web.url}/login?code={link.secret}", expires=timestamp(link.ends))

    async def ListAuthorities(self, request: pb.ListAuthoritiesRequest, context: Context) -> pb.ListAuthoritiesResponse:
        """The authorities of certificates, with the clients that depend on each."""
        return await self._authorities.listed()

    async def RevokeCertificates(
        self, request: pb.RevokeCertificatesRequest, context: Context
    ) -> pb.RevokeCertificatesResponse:
        """Deny certificates, and end their holders' calls."""
        revoked = await self.revoke_certificates(request)
        if request.name:
            self._services.fleet.expel(request.name, "a new certificate (the earlier ones are revoked)", "revoked")
        await self._denials.write()
        return revoked

    async def ListAudit(self, request: pb.ListAuditRequest, context: Context) -> pb.ListAuditResponse:
        """A page of the audit log, oldest first."""
        return await audit_page(self._services.ledger, request)


def _rate(request: pb.ResumeRunRequest) -> float:
    """The new learning rate of a resumed run; 0: unchanged. Raises InvalidInput."""
    if not request.HasField("learning_rate"):
        return 0.0
    if not 0 < request.learning_rate < math.inf:
        raise InvalidInput("learning_rate", "a number over 0", request.learning_rate)
    return request.learning_rate


def _watch_response(run: Run, progress: Progress) -> pb.WatchRunResponse:
    commit, hidden = progress.commit, run.context.hides_cohorts
    round_ = None if commit is None else round_summary(commit, hidden=hidden)
    return pb.WatchRunResponse(run=run_status(run), event=progress.event, detail=progress.detail, round=round_)
