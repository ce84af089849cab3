"""Executes one assignment: fetch, train, save and submit; or evaluate and report; or report the failure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from fl_client.assignments.checks import check_amount, check_assignment, check_evaluation
from fl_client.assignments.deadline import DeadlineTimer
from fl_client.assignments.reports import FailureReports, submit
from fl_client.audit.log import DeviceAudit, note_assigned, note_evaluation, subject_of
from fl_client.connection.bundles.cache import BundleCache
from fl_client.connection.link import Link
from fl_client.connection.messages import log_text
from fl_client.errors import (
    ClientError,
    GivenUp,
    ResourceGone,
    TransportError,
    WorkFailed,
    beyond_limits,
    task_error,
    unsupported,
)
from fl_client.gates.availability import AvailabilityMonitor
from fl_client.gates.state_directory import StateDirectory
from fl_client.monitoring.logs import Progress
from fl_client.monitoring.metrics import Metrics
from fl_client.packages.daemon import Packages
from fl_client.policy.rules import OrderedWork, ShardSize
from fl_client.policy.site import SitePolicy, ordered_work
from fl_client.privacy.charging import PrivacyCharging
from fl_client.secure_aggregation.participant import Participant, failed_stage
from fl_client.settings.config import LimitsConfig
from fl_client.storage.device_storage import DeviceStorage
from fl_client.storage.disk import DiskThread
from fl_client.storage.pending_updates import Key, PendingUpdate, key_fields, key_of, name_of
from fl_client.storage.release_folder import Taken
from fl_client.training.local_model import Bundles
from fl_client.training.own_loop import OnStep
from fl_client.training.private import PrivateWork
from fl_client.training.private_data import private_data
from fl_client.training.results import TrainingResult
from fl_client.training.trainer import AnyAssignment, Trainer
from fl_client.training.worker import Worker
from fl_common.secure_aggregation.scalars import Measured
from fl_common.tracing.traces import UNTRACED, Traces
from fl_common.units import counted
from protos.digests import digest_bytes, digest_text
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2

log = structlog.get_logger()

Work = Callable[[], Awaitable[None]]
T = TypeVar("T")

TRACEPARENT_CHARS = 128
"""A longer trace parent is ignored."""


@dataclass(frozen=True, slots=True)
class Services:
    """The daemon's parts that execute assignments."""

    link: Link
    bundles: BundleCache
    trainers: Sequence[Trainer]
    """One for each task that this device serves."""
    worker: Worker
    disk: DiskThread
    state: StateDirectory
    storage: DeviceStorage
    availability: AvailabilityMonitor
    policy: SitePolicy
    audit: DeviceAudit
    metrics: Metrics
    progress: Progress
    privacy: PrivacyCharging
    secure: Participant
    packages: Packages
    traces: Traces = UNTRACED
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    released: Taken | None = None
    """None: this device takes no releases."""

    def trainer_of(self, assignment: AnyAssignment) -> Trainer:
        """The trainer of an assignment's task and data. Without it, the first one, whose check refuses the task.

        Raises WorkFailed where there is none, because the packages of all tasks wait.
        """
        if not self.trainers:
            raise unsupported(f"expected the package of the task {assignment.task!r}")
        return next((trainer for trainer in self.trainers if trainer.serves(assignment)), self.trainers[0])


class AssignmentExecutor:
    """Executes assignments, each in a task of its own."""

    def __init__(self, services: Services, failures: FailureReports) -> None:
        self._services = services
        self._failures = failures

    async def handle_errors(self, key: Key, work_digest: bytes, timer: DeadlineTimer, work: Work) -> None:
        """Do the work of one assignment within its time. An error is reported, and ends no other work."""
        try:
            async with timer:
                await work()
        except WorkFailed as failure:
            self.report_failure(key, work_digest, failure)
        except ResourceGone as error:
            log.info("work_withdrawn", **key_fields(key), reason=str(error))
        except TransportError as error:
            if not isinstance(error, GivenUp):  # otherwise the update may have been admitted: its outcome decides
                await self._drop(key)
            self.report_failure(key, work_digest, WorkFailed(pb.FAILURE_REASON_REFUSED, f"the coordinator: {error}"))
        except Exception as error:  # a fault of the daemon must not end it: it trains for other rounds too
            log.exception("work_broken", **key_fields(key))
            message = f"{type(error).__name__}: {error}"
            self.report_failure(key, work_digest, task_error(message))

    async def train_and_submit(self, assignment: training_pb2.Assignment) -> None:
        """Train, save the update, submit it, and handle the receipt."""
        parent = assignment.traceparent
        with self._services.traces.within(parent if len(parent) <= TRACEPARENT_CHARS else ""):
            if assignment.training.HasField("privacy"):
                await self._without_details(assignment)
            else:
                await self._train_and_submit(assignment)

    async def _without_details(self, assignment: training_pb2.Assignment) -> None:
        """Train with privacy. An error of the training may name values of the data, so its text stays here."""
        try:
            await self._train_and_submit(assignment)
        except WorkFailed as failure:
            if failure.reason not in _OF_THE_DATA:
                raise
            trace = {"exception": failure.raised.traceback} if failure.raised is not None else {}
            log.error("private_work_failed", **key_fields(key_of(assignment.key)), message=str(failure), **trace)
            raise WorkFailed(failure.reason, _NO_DETAILS) from None
        except ClientError:
            raise
        except Exception:
            log.exception("private_work_broken", **key_fields(key_of(assignment.key)))
            raise task_error(_NO_DETAILS) from None

    async def _train_and_submit(self, assignment: training_pb2.Assignment) -> None:
        services, key = self._services, key_of(assignment.key)
        log.info("assignment", **key_fields(key), attempt=assignment.attempt, resources=len(assignment.resources))
        note_assigned(services.audit, assignment)
        with services.packages.using(trainer := services.trainer_of(assignment)):
            await self._work_with(trainer, assignment)

    async def _work_with(self, trainer: Trainer, assignment: training_pb2.Assignment) -> None:
        services, key = self._services, key_of(assignment.key)
        shard = ShardSize(len(trainer.local.train), trainer.local.train.own_batches)
        check_assignment(assignment, services.limits, shard.examples, shard.own_batches)
        await services.policy.check_names(assignment)
        amount = ordered_work(assignment.training, trainer.exchange_of(assignment), shard)
        check_amount(amount.steps or 0, services.limits)
        await services.policy.check_training(assignment, amount)
        secure = assignment.HasField("secure_aggregation")
        if secure:
            self._show(key, "sending its keys")
            await services.secure.begin(assignment)
        update = await services.state.required(services.storage.resume, assignment)
        if update is None:
            async with services.availability.while_allowed((assignment.key.run_id, assignment.key.round)):
                result, measured = await self._train(assignment, amount)
            if secure:
                self._show(key, "waiting for the shares of the other clients")
                masked = await services.secure.masked(assignment, result.update, measured)
                result = TrainingResult(masked, result.next_state)
            update = await self._save(result)
            del result  # its tensors are not needed during the upload
        # An update made for an earlier attempt answers this one too: the work is the same.
        update.header.attempt = assignment.attempt
        self._show(key, "sending the update")
        receipt = await submit(services.link, update, services.disk, services.policy)
        await self._handle_receipt(update.header, receipt)

    async def _train(self, assignment: training_pb2.Assignment, amount: OrderedWork) -> tuple[TrainingResult, Measured]:
        services, key = self._services, key_of(assignment.key)
        trainer = services.trainer_of(assignment)
        trainer.check_task(assignment)
        state = await services.state.required(services.storage.state_for, assignment)
        if trainer.keeps_state(assignment):
            await services.state.required(services.storage.check_limits, key[0])
        if assignment.training.HasField("privacy"):
            await self.compute(lambda check: trainer.check_private(assignment))
        await services.policy.begin_training(assignment, amount)
        self._show(key, "fetching the model")
        bundles = await self._bundles(assignment)
        private: PrivateWork | None = None
        if assignment.training.HasField("privacy"):
            data = await self.compute(lambda check: private_data(trainer.local.train))
            private = await services.privacy.begin(assignment, bundles, data, trainer.local.data)

        shares = services.policy.policy.share.evaluations

        def work(check: Callable[[], None]) -> tuple[TrainingResult, Measured]:
            received = trainer.measure_received(assignment, bundles, state) if shares else Measured()
            return trainer.train(assignment, bundles, state, self._on_step(key, check), private), received

        with services.traces.span("training"), _left_if_it_fails(trainer):
            result, measured = await self.compute(work)
        self._note_trained(key, result.update.header, measured)
        return result, measured

    def _note_trained(self, key: Key, header: training_pb2.UpdateHeader, measured: Measured) -> None:
        """Count, record and log a training, and the evaluation of the model that was received."""
        services = self._services
        if measured.examples:
            sums = ", ".join(sorted(measured.metrics))
            detail = f"{counted(measured.examples, 'example')}, sums of {sums} under masks"
            services.audit.note("evaluated", subject_of(key), detail=detail)
        services.metrics.update_trained(header)
        detail = f"{counted(header.num_examples, 'example')}, {counted(header.num_steps, 'step')}"
        services.audit.note("trained", subject_of(key), detail=detail)
        loss = round(header.training_loss, 5) if header.HasField("training_loss") else None
        seconds = round(header.training_seconds, 3)
        log.info("trained", **key_fields(key), steps=header.num_steps, loss=loss, seconds=seconds)

    async def _save(self, result: TrainingResult) -> PendingUpdate:
        """Write the update before it is sent, so that a restart does not repeat the training.

        An update with a next client state is not sent unsaved: the state would be lost if the update counted.
        """
        update, services = result.update, self._services
        try:
            return await services.state.run(services.storage.save, update, result.next_state)
        except OSError as error:
            if result.next_state is not None:
                await services.state.step_back(update.header.size_bytes + result.next_state.size_bytes)
                raise beyond_limits(f"state_dir: expected space for the client state, got {error}") from error
            log.warning("update_not_kept", **key_fields(key_of(update.header.key)), reason=str(error))
            return PendingUpdate.in_memory(update)

    async def _handle_receipt(self, header: training_pb2.UpdateHeader, receipt: training_pb2.Receipt) -> None:
        """Log the receipt. An admitted update stays on disk until its outcome, a refused one is removed."""
        key = key_of(header.key)
        if receipt.admitted and receipt.digest == header.digest:
            self._services.metrics.update_admitted()
            log.info("submitted", **key_fields(key), bytes=header.size_bytes)
            detail = f"{header.size_bytes} bytes, {digest_text(digest_bytes(header.digest))}"
            self._services.audit.note("submitted", subject_of(key), detail=detail)
            return
        reason = name_of(training_pb2.RefusalReason, receipt.reason)
        if receipt.admitted:
            reason = "ANOTHER_UPDATE_WAS_FIRST"
        await self._drop(key)
        self._services.metrics.receipts.labels("refused").inc()
        self._services.audit.note("update_refused", subject_of(key), reason.lower(), receipt.detail)
        log.warning("update_refused", **key_fields(key), reason=reason, detail=log_text(receipt.detail))

    async def repeat_keys(self, assignment: training_pb2.Assignment) -> None:
        """Send the keys of work in progress once more: a coordinator that was restarted may not have them."""
        with suppress(WorkFailed, TransportError):  # the work itself fails with it, too
            await self._services.secure.begin(assignment)

    async def answer_stage(self, message: training_pb2.StageMessage) -> None:
        """Answer a stage of secure aggregation. A failure ends the work for its key."""
        try:
            await self._services.secure.answer(message)
        except (WorkFailed, TransportError) as error:
            self.report_failure(key_of(message.key), b"", failed_stage(error))

    async def evaluate(self, assignment: training_pb2.EvaluationAssignment) -> None:
        """Evaluate on this device's held-out examples, and report the metrics."""
        note_evaluation(self._services.audit, assignment)
        check_evaluation(assignment)
        await self._services.policy.check_evaluation(assignment)
        with self._services.packages.using(trainer := self._services.trainer_of(assignment)):
            await self._evaluate_with(trainer, assignment)

    async def _evaluate_with(self, trainer: Trainer, assignment: training_pb2.EvaluationAssignment) -> None:
        services, key = self._services, key_of(assignment.key)
        trainer.check_task(assignment)
        self._show(key, "evaluating")
        state = None
        if assignment.personal:
            state = await services.state.required(services.storage.latest_state, assignment)
        async with services.availability.while_allowed():
            await services.policy.begin_evaluation(assignment, len(trainer.local.held_out))
            bundles = await self._bundles(assignment)
            with _left_if_it_fails(trainer):
                evaluation = await self.compute(lambda check: trainer.evaluate(assignment, bundles, state))

        request = evaluation.report()
        request.key.CopyFrom(assignment.key)
        await services.link.ask(request, pb.ReportEvaluationResponse)
        detail = f"{counted(evaluation.examples, 'example')}, sent {evaluation.sent()}"
        services.audit.note("evaluated", subject_of(key), detail=detail)
        log.info("evaluated", **key_fields(key), examples=evaluation.examples, metrics=evaluation.metrics)

    async def _bundles(self, assignment: AnyAssignment) -> Bundles:
        """The bundles of an assignment. Their layouts are those of the model, which the first call makes."""
        trainer = self._services.trainer_of(assignment)
        layouts = trainer.known_layouts(assignment)
        if layouts is None:
            layouts = await self.compute(lambda check: trainer.layouts(assignment))
        return await self._services.bundles.get(assignment.resources, layouts, assignment.key.run_id)

    async def compute(self, function: Callable[[Callable[[], None]], T]) -> T:
        """The function's result from the worker thread, within the owner's limit and the site's budget."""
        policy, limit = self._services.policy, self._services.limits.max_seconds
        left = policy.budget.seconds_left()

        def timed(check: Callable[[], None]) -> T:
            with policy.budget.computing():
                return function(check)

        try:
            return await self._services.worker.run(timed, min(limit, left))
        except TimeoutError:
            if left < limit:
                raise policy.out_of_time() from None
            raise beyond_limits(
                f"this device's owner allows {limit:g} s of computing for an assignment (limits.max_seconds)"
            ) from None

    def report_failure(self, key: Key, work_digest: bytes, failure: WorkFailed) -> None:
        """Report to the coordinator that an assignment failed, and why."""
        reason = pb.FailureReason.Name(failure.reason).removeprefix("FAILURE_REASON_").lower()
        self._services.metrics.failures.labels(reason).inc()
        method = "refused" if failure.reason == pb.FAILURE_REASON_POLICY else "failed"
        self._services.audit.note(method, subject_of(key), reason, str(failure))
        write = log.info if failure.reason in _EXPECTED else log.error
        traceback = failure.raised.traceback if failure.raised is not None else ""
        # The key that log renderers know a traceback by.
        trace = {"exception": traceback} if traceback else {}
        write("work_failed", **key_fields(key), reason=reason, message=log_text(str(failure)), **trace)
        self._failures.add(key, work_digest, failure)

    async def _drop(self, key: Key) -> None:
        with suppress(OSError):  # a file that stays is removed with the run's next round
            await self._services.state.run(self._services.storage.drop, key)

    def _on_step(self, key: Key, check: Callable[[], None]) -> OnStep:
        def on_step(step: int, steps: int) -> None:
            check()
            self._services.metrics.steps.inc()
            self._show(key, f"step {step} of {steps}")

        return on_step

    def _show(self, key: Key, activity: str) -> None:
        self._services.progress.show(f"{key[0]}, round {key[1]}: {activity}")


_OF_THE_DATA = (pb.FAILURE_REASON_TASK_ERROR, pb.FAILURE_REASON_NOT_FINITE)
_NO_DETAILS = "the training with privacy failed; this device's log says why"
_EXPECTED = (pb.FAILURE_REASON_STOPPED, pb.FAILURE_REASON_POLICY)
"""Reasons that are the owner's wish, and no fault."""


@contextmanager
def _left_if_it_fails(trainer: Trainer) -> Iterator[None]:
    """Tell the trainer that nobody waits for its work any more, if the waiting ends without a result."""
    try:
        yield
    except BaseException:
        trainer.leave()
        raise
