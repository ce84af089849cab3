"""Answering one assignment: fetch, train, keep, send; or evaluate and report; or say why not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from fl_client import answers, uploads
from fl_client.assignments.checks import check_assignment, check_resources
from fl_client.assignments.clock import Clock
from fl_client.assignments.reports import Reports
from fl_client.bundles import BundleCache
from fl_client.config import LimitsConfig
from fl_client.connection.reading import text
from fl_client.disk import Disk
from fl_client.errors import ResourceGone, TransportError, WorkFailed
from fl_client.gatekeeper import Gatekeeper
from fl_client.link import Link, Session
from fl_client.logs import Progress
from fl_client.metrics import Metrics
from fl_client.shelf import Shelf
from fl_client.training import Layouts, OnStep, Trained, Trainer
from fl_client.updates import Key, Outgoing, key_of, name_of
from fl_client.worker import Worker
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2
from protos.traces import UNTRACED, Traces

log = structlog.get_logger()

Answer = Callable[[], Awaitable[None]]
T = TypeVar("T")

TRACEPARENT_CHARS = 128
"""A longer one is none."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What work is done with."""

    link: Link
    bundles: BundleCache
    trainer: Trainer
    worker: Worker
    disk: Disk
    shelf: Shelf
    gatekeeper: Gatekeeper
    metrics: Metrics
    progress: Progress
    traces: Traces = UNTRACED
    limits: LimitsConfig = field(default_factory=LimitsConfig)


class Work:
    """What is done for one key, from the assignment to the coordinator's last word on it."""

    def __init__(self, tools: Tools, reports: Reports) -> None:
        self._tools = tools
        self._reports = reports

    async def see_through(self, key: Key, work: bytes, clock: Clock, answer: Answer) -> None:
        """See one answer through: whatever goes wrong with it is told, and ends nothing but this work.

        work: its name by `work_of`. clock: what it may take.
        """
        try:
            async with clock:
                await answer()
        except WorkFailed as failure:
            self.give_up(key, work, failure)
        except ResourceGone as error:
            log.info("work_withdrawn", **named(key), reason=str(error))
        except TransportError as error:
            await self._drop(key)
            log.error("work_refused", **named(key), reason=str(error))
        except Exception as error:  # a fault of ours must not end a daemon that trains for other rounds too
            log.exception("work_broken", **named(key))
            self.give_up(key, work, WorkFailed(pb.FAILURE_REASON_TASK_ERROR, f"{type(error).__name__}: {error}"))

    async def contribute(self, assignment: training_pb2.Assignment) -> None:
        """Train, keep the update, send it, and take the receipt."""
        place = assignment.traceparent
        with self._tools.traces.within(place if len(place) <= TRACEPARENT_CHARS else ""):
            await self._contribute(assignment)

    async def _contribute(self, assignment: training_pb2.Assignment) -> None:
        tools, key = self._tools, key_of(assignment.key)
        log.info("assignment", **named(key), attempt=assignment.attempt, resources=len(assignment.resources))
        check_assignment(assignment, tools.limits, tools.trainer.examples)
        with _disk_failures():
            update = await tools.disk.run(tools.shelf.resume, assignment)
        if update is None:
            update = await self._made(assignment)
        # What was made for an earlier attempt answers this one too: it is the same work.
        update.header.attempt = assignment.attempt
        self._say(key, "sending the update")
        receipt = await uploads.submit(tools.link, update, tools.disk, tools.metrics.sent)
        await self._take_receipt(update.header, receipt)

    async def _made(self, assignment: training_pb2.Assignment) -> Outgoing:
        """The answer, trained and kept; the memory in which it was computed is free for the next."""
        async with self._tools.gatekeeper.at_work((assignment.key.run_id, assignment.key.round)):
            trained = await self._train(assignment)
        return await self._keep(trained)

    async def _train(self, assignment: training_pb2.Assignment) -> Trained:
        tools, key = self._tools, key_of(assignment.key)
        tools.trainer.check(assignment.task, assignment.fingerprint)
        with _disk_failures():
            kept = await tools.disk.run(tools.shelf.state_for, assignment)
            if answers.method_of(assignment.training).keeps_client_state:
                await tools.disk.run(tools.shelf.check_room, key[0])
        self._say(key, "fetching the model")
        bundles = await tools.bundles.get(assignment.resources, await self._expected())

        def work(check: Callable[[], None]) -> Trained:
            return tools.trainer.train(assignment, bundles, kept, self._on_step(key, check))

        with tools.traces.span("training"):
            trained = await self._computed(work)
        header = trained.update.header
        tools.metrics.computed(header)
        log.info(
            "trained",
            **named(key),
            steps=header.num_steps,
            loss=round(header.training_loss, 5) if header.HasField("training_loss") else None,
            seconds=round(header.training_seconds, 3),
        )
        return trained

    async def _keep(self, trained: Trained) -> Outgoing:
        """Write the update down before it is sent, so that it is not computed again after a restart.

        One that leaves a client state is not sent without: should it count, the state would be lost.
        """
        update, tools = trained.update, self._tools
        try:
            return await tools.disk.run(tools.shelf.keep, update, trained.next_state)
        except OSError as error:
            if trained.next_state is not None:
                raise WorkFailed(
                    pb.FAILURE_REASON_RESOURCES, f"state_dir: expected room for the client state, got {error}"
                ) from error
            log.warning("update_not_kept", **named(key_of(update.header.key)), reason=str(error))
            return Outgoing.in_memory(update)

    async def _take_receipt(self, header: training_pb2.UpdateHeader, receipt: training_pb2.Receipt) -> None:
        """Log the coordinator's word. An admitted update stays on disk until its outcome, a refused one goes."""
        key = key_of(header.key)
        if receipt.admitted and receipt.digest == header.digest:
            self._tools.metrics.admitted()
            log.info("submitted", **named(key), bytes=header.size_bytes)
            return
        reason = name_of(training_pb2.RefusalReason, receipt.reason)
        detail = text(receipt.detail)
        if receipt.admitted:
            reason = "ANOTHER_UPDATE_WAS_FIRST"
        await self._drop(key)
        self._tools.metrics.receipts.labels("refused").inc()
        log.warning("update_refused", **named(key), reason=reason, detail=detail)

    async def evaluate(self, assignment: training_pb2.EvaluationAssignment) -> None:
        """Evaluate on this device's held-out part, and report."""
        tools, key = self._tools, key_of(assignment.key)
        check_resources(assignment.resources)
        tools.trainer.check(assignment.task, assignment.fingerprint)
        self._say(key, "evaluating")
        async with tools.gatekeeper.at_work():
            bundles = await tools.bundles.get(assignment.resources, await self._expected())
            examples, metrics = await self._computed(lambda check: tools.trainer.evaluate(assignment, bundles))

        async def report(session: Session) -> None:
            await session.connection.report_evaluation(
                pb.ReportEvaluationRequest(
                    session_id=session.id, key=assignment.key, num_examples=examples, metrics=metrics
                )
            )

        await tools.link.patiently(report)
        log.info("evaluated", **named(key), examples=examples, **metrics)

    async def _expected(self) -> Layouts:
        """How the bundles of this device's own model lie. The first time, the model is made for it."""
        trainer = self._tools.trainer
        if trainer.layouts is None:
            await self._computed(lambda check: trainer.prepare())
        assert trainer.layouts is not None  # noqa: S101 - for the type: the model is made
        return trainer.layouts

    async def _computed(self, function: Callable[[Callable[[], None]], T]) -> T:
        """What the one thread that touches the model gives, within the owner's limit."""
        seconds = self._tools.limits.max_seconds
        try:
            return await self._tools.worker.run(function, seconds)
        except TimeoutError:
            raise WorkFailed(
                pb.FAILURE_REASON_RESOURCES,
                f"this device's owner allows {seconds:g} s of computing for an assignment (limits.max_seconds)",
            ) from None

    def give_up(self, key: Key, work: bytes, failure: WorkFailed) -> None:
        """Tell the coordinator that a key's work will not be delivered, and why. work: its name by `work_of`."""
        reason = pb.FailureReason.Name(failure.reason).removeprefix("FAILURE_REASON_").lower()
        self._tools.metrics.failures.labels(reason).inc()
        stopped = failure.reason == pb.FAILURE_REASON_STOPPED
        (log.info if stopped else log.error)("work_failed", **named(key), reason=reason, message=text(str(failure)))
        self._reports.add(key, work, failure.reason, str(failure))

    async def _drop(self, key: Key) -> None:
        with suppress(OSError):  # it is in nobody's way
            await self._tools.disk.run(self._tools.shelf.drop, key)

    def _on_step(self, key: Key, check: Callable[[], None]) -> OnStep:
        def on_step(step: int, steps: int) -> None:
            check()
            self._tools.metrics.steps.inc()
            self._say(key, f"step {step} of {steps}")

        return on_step

    def _say(self, key: Key, what: str) -> None:
        self._tools.progress.say(f"{key[0]}, round {key[1]}: {what}")


@contextmanager
def _disk_failures() -> Iterator[None]:
    """What the state directory cannot do, as a failure that the coordinator hears of."""
    try:
        yield
    except OSError as error:
        raise WorkFailed(
            pb.FAILURE_REASON_RESOURCES, f"state_dir: expected one that can be written, got {error}"
        ) from error


def named(key: Key) -> dict[str, str | int]:
    """The key as fields of a log line."""
    return {"run": key[0], "round": key[1], "exchange": key[2]}
