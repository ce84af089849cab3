"""The Coordinator service: turns messages into calls of the coordinator, and results into messages.

Each failure in a ReportStatus takes effect by itself: a refused one does not stop the others. A client is taken out of
the round for any reason, also one that this version does not know. Work that a site's policy refuses does not count
towards quarantine; the run draws the client no more.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from typing import Any

import grpc.aio
import structlog
from google.protobuf.message import Message

from fl_common.metrics import package_version
from fl_common.settings import split_address
from fl_server.audit.log import AuditRecord
from fl_server.clients.eligibility import Work
from fl_server.clients.fleet import Fleet
from fl_server.clients.registration import check_availability
from fl_server.clients.sessions import Transfer
from fl_server.errors import InvalidInput, NoCommonProtocol, NoSuchRun, NotNow
from fl_server.identity import ANYBODY, address, caller
from fl_server.rpc.call_limits import MOST_VALUES, VALUES_A_TENSOR, parse_request
from fl_server.rpc.releases import reported_device
from fl_server.rpc.transfers import Download, digest_in
from fl_server.run.failures import MAX_NOTE, Reason
from fl_server.run.lost_states import InvalidLossReport
from fl_server.run.run import Run
from fl_server.runs.coordinator import Coordinator
from fl_server.services import Services
from fl_server.store.errors import StoreFull
from fl_server.uploads.part_receiver import BUSY_WAIT_S
from fl_server.uploads.receiver import UploadReceiver
from fl_server.uploads.stream import Request, Requests, TimeLimit, part_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import coordinator_pb2_grpc
from protos.fl.v1.coordinator_pb2 import FailureReason
from protos.fl.v1.training_pb2 import Receipt, RefusalReason, UpdateHeader
from protos.wire import KEEPALIVE_SECONDS, MAX_CHUNK_BYTES, known_name

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]
SERVICE = "fl.v1.Coordinator"
MAX_FAILURES = 64
"""Most failures in one call."""
MAX_CHARS = 1000
"""Characters of a failure's message that are used."""
_OF_CODE = frozenset({
    pb.FAILURE_REASON_UNSPECIFIED, pb.FAILURE_REASON_TASK_ERROR, pb.FAILURE_REASON_LAYOUT,
    pb.FAILURE_REASON_NOT_FINITE, pb.FAILURE_REASON_RESOURCES,
})  # fmt: skip
"""Failures that count against the package of the task's code."""
MAX_TYPE, MAX_PLACE = 100, 200
"""Characters of an error's type and place that are used."""


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    """The methods that client daemons call."""

    def __init__(self, services: Services, coordinator: Coordinator, uploads: UploadReceiver) -> None:
        self._services = services
        self._fleet: Fleet = services.fleet
        self._coordinator = coordinator
        self._uploads = uploads
        self._transfer_limits = services.fleet.transfer_limits
        self._reports = Reports(services, coordinator)

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        """Open a session, and return the outcomes that the client has missed."""
        try:
            session, protocol = await self._fleet.register(request)
        except NoCommonProtocol as error:
            error.detail.version = package_version("impetus-fl")
            error.detail.min_client_version = self._coordinator.min_client_version
            raise
        response = pb.RegisterResponse(
            session_id=session.id,
            protocol=protocol,
            coordinator_id=self._services.ledger.store.coordinator_id,
            limits=self._limits(),
            data_address=self._data_address(),
        )
        response.time.FromSeconds(int(time.time()))
        outcomes, ended_runs = await self._coordinator.settled(request, session.client_id)
        response.outcomes.extend(outcomes)
        response.ended_runs.extend(ended_runs)
        return response

    def _limits(self) -> pb.Limits:
        limits = pb.Limits(max_chunk_bytes=MAX_CHUNK_BYTES, chunk_bytes=self._services.config.limits.chunk_bytes)
        limits.keepalive.FromSeconds(KEEPALIVE_SECONDS)
        limits.reattach_grace.FromMilliseconds(int(self._services.config.limits.reattach_grace_s * 1000))
        return limits

    def _data_address(self) -> str:
        """Where workers serve clients; empty without workers."""
        if (workers := self._services.config.workers) is None:
            return ""
        return workers.address or f":{split_address(workers.serve)[1]}"

    async def Attend(self, request: pb.AttendRequest, context: Context) -> AsyncIterator[pb.AttendResponse]:
        """Push work to the client for as long as it reads."""
        async with self._transfer_limits.call(self._client(request.session_id), "attends"):
            async for message in self._fleet.streams.attend(request):
                yield message

    def _client(self, session_id: str) -> str:
        """The client of a session. Raises UnknownSessionError, Forbidden."""
        return self._fleet.sessions.of_call(session_id).client_id

    async def FetchModel(self, request: pb.FetchModelRequest, context: Context) -> AsyncIterator[bytes]:
        """Yields encoded messages: the serializer of this method passes bytes through.

        A reader that reads nothing still counts as one of the client's downloads: the transport frees the message that
        it holds only when the reader takes it or hangs up, and not when the call is ended here.
        """
        async with self._transfer_limits.call(self._client(request.session_id), "downloads"):
            with self._fleet.sessions.transfer(request.session_id) as transfer:
                async for message in self._messages(request, transfer):
                    yield message

    async def _messages(self, request: pb.FetchModelRequest, transfer: Transfer) -> AsyncIterator[bytes]:
        download = Download(self._services, self._coordinator, request, transfer)
        places = download.places
        with download.under_way():
            for place in places:
                message, count = download.message(place)
                download.charge(count, len(message))
                if place == places[-1]:
                    download.complete()
                yield message
                del message
                await download.sent(count)

    async def SubmitUpdate(self, request_iterator: Requests, context: Context) -> pb.SubmitUpdateResponse:
        """Receive an upload."""
        holder = holder_of(context)
        async with self._transfer_limits.call(holder, "uploads") if holder else nullcontext():
            requests = aiter(request_iterator)
            header = await read_header(requests, self._services.config.limits.stall_s)
            client = self._client(header.session_id)
            async with self._transfer_limits.call(client, "uploads") if client != holder else nullcontext():
                with self._fleet.sessions.transfer(header.session_id) as transfer:
                    receipt = await self._submit(transfer, header, requests)
                    if receipt.admitted:
                        self._fleet.sessions.update_admitted(header.session_id)
                    return pb.SubmitUpdateResponse(receipt=receipt)

    async def _submit(self, transfer: Transfer, header: UpdateHeader, requests: Requests) -> Receipt:
        try:
            run = self._coordinator.run_of_call(header.key.run_id)
        except NoSuchRun:
            late = RefusalReason.REFUSAL_REASON_LATE
            return Receipt(key=header.key, digest=header.digest, reason=late, detail="no such run")
        return await self._uploads.submit(run, header, transfer, requests)

    def read_part(self, message: bytes) -> Request:
        """Parse a message of SubmitUpdate. Raises InvalidInput."""
        return parse_request(message, self._most_values)

    def _most_values(self) -> int:
        """Most values in a header: enough for the largest model of a run."""
        models = (run.model for run in self._coordinator.runs() if run.model.loaded)
        tensors = (len(model.engine.layout.entries) for model in models)
        return max(MOST_VALUES, VALUES_A_TENSOR * max(tensors, default=0))

    async def QueryUpload(self, request: pb.QueryUploadRequest, context: Context) -> pb.QueryUploadResponse:
        """The offset at which to resume an upload, or its receipt."""
        client = self._client(request.session_id)
        async with self._transfer_limits.call(client, "queries"):
            run = self._coordinator.run_of_call(request.key.run_id)
            receipt, wanted = await self._uploads.query(run, request.key, client)
            if receipt is not None or not wanted:
                return pb.QueryUploadResponse(receipt=receipt)
            digest = digest_in(request.digest)
            return pb.QueryUploadResponse(kept_bytes=await self._uploads.kept_bytes(request.key, client, digest))

    async def ReportStatus(self, request: pb.ReportStatusRequest, context: Context) -> pb.ReportStatusResponse:
        """Take the client's availability and its failures."""
        await self._reports.take(self._fleet.sessions.of_call(request.session_id).client_id, request)
        return pb.ReportStatusResponse()

    async def AnswerStage(self, request: pb.AnswerStageRequest, context: Context) -> pb.AnswerStageResponse:
        """Take a client's answer to a stage of secure aggregation."""
        client = self._client(request.session_id)
        async with self._transfer_limits.call(client, "queries"):
            run = self._coordinator.run_of_call(request.answer.key.run_id)
            return pb.AnswerStageResponse(wanted=await run.stages.answer(client, request.answer))

    async def ReportEvaluation(
        self, request: pb.ReportEvaluationRequest, context: Context
    ) -> pb.ReportEvaluationResponse:
        """Take a client's evaluation."""
        client_id = self._client(request.session_id)
        async with self._transfer_limits.call(client_id, "queries"):
            run = self._coordinator.run_of_call(request.key.run_id)
            await run.client_evaluations.report(client_id, request)
        return pb.ReportEvaluationResponse()

    async def ReportRelease(self, request: pb.ReportReleaseRequest, context: Context) -> pb.ReportReleaseResponse:
        """Take what became of a released model on a client's device."""
        client = self._client(request.session_id)
        async with self._transfer_limits.call(client, "queries"):
            device = reported_device(request)
            await self._coordinator.releases.report(client, request.model, request.version, device)
        return pb.ReportReleaseResponse()


async def read_header(requests: Requests, stall_s: float) -> UpdateHeader:
    """The first message of an upload. Raises NotNow if it does not come in time, InvalidInput."""
    try:
        with TimeLimit(stall_s):
            first = await anext(requests, None)
    except TimeoutError:
        raise NotNow(f"no header of an upload came in {stall_s:g} s", BUSY_WAIT_S) from None
    if not isinstance(first, pb.SubmitUpdateRequest) or not first.HasField("header"):
        raise InvalidInput("part", "a header first", part_of(first))
    return first.header


def holder_of(context: Context) -> str:
    """Who a call counts for before it names a session: the certificate's holder; without one, the connection."""
    who = caller.get()
    if who is not ANYBODY:
        return who.name
    return "" if context is None else context.peer()


def handlers(service: CoordinatorService) -> grpc.GenericRpcHandler:
    """The service's methods with the serializers of the generated code, except those that carry chunks.

    FetchModel yields encoded messages, and `read_part` reads SubmitUpdate's chunks without a copy.
    """
    unary, push = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Register": method(unary, service.Register, pb.RegisterRequest),
        "Attend": method(push, service.Attend, pb.AttendRequest),
        "FetchModel": method(push, service.FetchModel, pb.FetchModelRequest, bytes),
        "SubmitUpdate": grpc.stream_unary_rpc_method_handler(service.SubmitUpdate, service.read_part, serialized),
        "QueryUpload": method(unary, service.QueryUpload, pb.QueryUploadRequest),
        "ReportStatus": method(unary, service.ReportStatus, pb.ReportStatusRequest),
        "AnswerStage": method(unary, service.AnswerStage, pb.AnswerStageRequest),
        "ReportEvaluation": method(unary, service.ReportEvaluation, pb.ReportEvaluationRequest),
        "ReportRelease": method(unary, service.ReportRelease, pb.ReportReleaseRequest),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def serialized(response: Message) -> bytes:
    """The serializer of responses."""
    return response.SerializeToString()


def method(
    make: Callable[..., grpc.RpcMethodHandler[Any, Any]],
    function: Callable[..., Any],
    request: type[Message],
    serialize: Callable[[Any], bytes] = serialized,
) -> grpc.RpcMethodHandler[Any, Any]:
    """The handler of one method."""
    return make(function, request.FromString, serialize)


class Reports:
    """ReportStatus: a client's availability, and the work that it gives up. Lives on the event loop."""

    def __init__(self, services: Services, coordinator: Coordinator) -> None:
        self._services = services
        self._coordinator = coordinator

    async def take(self, client: str, request: pb.ReportStatusRequest) -> None:
        """Handle a call: every failure is taken, refused, or left for a repeat of the call.

        Raises the first error that is not the client's, such as StoreFull, otherwise InvalidInput for the first
        refused failure. A repeat of the call is harmless: what took effect is late or not assigned then.
        """
        if len(request.failures) > MAX_FAILURES:
            raise InvalidInput("failures", f"{MAX_FAILURES} at most", f"{len(request.failures)}")
        check_availability(request.availability)
        if request.HasField("availability"):
            self._services.fleet.eligibility.set_availability(client, request.availability)
        refused: list[InvalidInput] = []
        faults: list[Exception] = []
        for number, failure in enumerate(request.failures):
            try:
                await self._failure(client, failure)
            except NoSuchRun as error:
                self._refused("unknown_run")
                refused.append(InvalidInput(f"failures[{number}].key.run_id", "a run of this coordinator", error))
            except InvalidLossReport as error:
                self._refused("no_state")
                refused.append(InvalidInput(f"failures[{number}].reason", str(error), "STATE_LOST"))
            except Exception as error:  # noqa: BLE001 - an error in one run must not block reports to the others
                faults.append(error)
        if problems := [*faults, *refused]:
            raise problems[0]

    async def _failure(self, client: str, failure: pb.WorkFailure) -> None:
        run, why = self._run(failure.key.run_id), failure.message[:MAX_CHARS]
        if run.run_status.write_failure:
            raise StoreFull(run.run_status.write_failure)  # the client tries again, instead of waiting with the run
        if failure.reason == pb.FAILURE_REASON_STATE_LOST:
            await run.lost_states.report(client, failure.key, why[:MAX_NOTE])
            return
        reason = known_name(FailureReason, failure.reason).removeprefix("FAILURE_REASON_").lower()
        by_policy = failure.reason == pb.FAILURE_REASON_POLICY
        why = why.removeprefix("policy: ") if by_policy else why
        words, not_finite = f"{reason}: {why}", failure.reason == pb.FAILURE_REASON_NOT_FINITE
        evaluates = run.client_evaluations.client_failed(failure.key, client)
        wanted = evaluates or run.submissions.works(failure.key, client)
        if by_policy and wanted:  # a repeated report must not make the run check all clients
            await self._refused_by_policy(run, client, "evaluation" if evaluates else "training", why[:MAX_NOTE])
        of_code = failure.reason in _OF_CODE
        reason_here = Reason(words, "" if by_policy else _cause(failure), not_finite, of_code)
        works = await run.submissions.client_failed(failure.key, client, reason_here)
        if not (evaluates or works):
            late = run.submissions.refusal_for(failure.key, client) == RefusalReason.REFUSAL_REASON_LATE
            self._refused("late" if late else "not_assigned")
            return
        # Logged once for each assignment, because it can be given up only once.
        run.context.cohort_log.warning("client_failed", run=run.id, round=failure.key.round, client=client, why=words)
        if works and not by_policy:  # a site's policy is no fault of its client
            await run.submissions.failures.count(client, words)
        else:
            await self._services.fleet.records.write_note(client, words[:MAX_NOTE])

    def _run(self, run_id: str) -> Run:
        """The run of a failure. Raises NotNow while it is being loaded, and NoSuchRun if nothing loads it now.

        Such a run asks for the work again when another start loads it, and other runs' failures do not wait for it.
        """
        waiting = self._coordinator.table.not_loaded.get(run_id)
        if waiting is not None and not waiting.loading:
            return self._coordinator.run(run_id)
        return self._coordinator.run_of_call(run_id)

    async def _refused_by_policy(self, run: Run, client: str, kind: Work, why: str) -> None:
        """Draw the client no more for this work, before anything else is drawn in its place."""
        record = AuditRecord(f"client:{client}", address.get(), "policy_refused", run.id, "refused", why)
        self._services.audit.record_refusal(record)
        self._services.fleet.eligibility.refused_by_policy(client, run.id, kind, why)
        await run.in_turn(run.refresh_roster())

    def _refused(self, reason: str) -> None:
        self._services.metrics.reports_refused.labels(reason).inc()


def _cause(failure: pb.WorkFailure) -> str:
    """What failures of different clients have in common; empty where the task's own code raised nothing.

    An error of what that code returned, such as a loss that is no tensor, has no line. Its message is the same.
    """
    kind, place = failure.error_type[:MAX_TYPE], (failure.place or failure.message)[:MAX_PLACE]
    return f"{kind} ({place})" if kind else ""
