"""Takes released models: checks, fetches and installs the version of an order, announces and evaluates it, and reports.

The newest order of a model wins: it ends the evaluation of an earlier one. What this process has answered is answered
again; another process begins with what is on the disk.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import structlog
from blake3 import blake3

from fl_client.assignments.announcing import NotTaken, announced
from fl_client.assignments.checks import InvalidEvent
from fl_client.assignments.executor import AssignmentExecutor, Services
from fl_client.connection.bundles.download import Download, ExpectedBytes
from fl_client.connection.link import Backoff
from fl_client.connection.messages import log_text
from fl_client.errors import PolicyRefused, TransportError, WorkFailed
from fl_client.storage.release_folder import Installed, Taken
from fl_client.training.trainer import Trainer
from fl_common.names import check_id
from fl_common.released import Description, check_signature, parse_description
from fl_common.signatures import WrongSignature
from protos.buffers import zeros
from protos.digests import digest_message
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import EvaluationAssignment

log = structlog.get_logger()

TRIES = 3
"""Times that bytes with another digest are fetched again."""
AGAIN_S = 15.0
"""Wait before an evaluation is tried again that the owner's gates have ended."""
MOST_MODELS = 16
"""Models for which orders are taken."""


class Refused(Exception):
    """The device does not take the version."""


class Releases:
    """The released models of one device. Lives on the event loop; files and hashes in threads."""

    def __init__(self, services: Services, executor: AssignmentExecutor, tasks: asyncio.TaskGroup) -> None:
        self._services, self._executor, self._tasks = services, executor, tasks
        self._taken = services.released
        self._next: dict[str, pb.ReleaseOrder] = {}
        self._now: dict[str, pb.ReleaseOrder] = {}
        """Orders by model: the newest that waits, and the one that is being carried out."""
        self._newer: dict[str, asyncio.Event] = {}
        self._answered: dict[str, tuple[pb.ReleaseOrder, pb.ReportReleaseRequest]] = {}
        """The latest order of each model, once it is carried out, and its answer."""
        self._running: set[asyncio.Task[None]] = set()

    def order(self, order: pb.ReleaseOrder) -> None:
        """Carry out an order, after the one of the same model that is being carried out. Raises InvalidEvent."""
        try:
            model = check_id("the model of a release", order.model)
        except ValueError as error:
            raise InvalidEvent(str(error)) from None
        if self._taken is None:
            raise InvalidEvent("this device takes no releases: its settings have no section [releases]")
        if len(self._newer) >= MOST_MODELS and model not in self._newer:
            raise InvalidEvent(f"expected releases of at most {MOST_MODELS} models, got one more: {model}")
        if model in self._now or model in self._next:
            if self._now.get(model) != order or model in self._next:
                self._next[model] = order
                self._newer[model].set()
            return
        self._next[model], self._newer[model] = order, asyncio.Event()
        task = self._tasks.create_task(self._run(model, self._taken))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def stop(self) -> None:
        """Carry out nothing any more."""
        for task in self._running:
            task.cancel()

    async def _run(self, model: str, taken: Taken) -> None:
        """Carry out orders of a model, one after the other."""
        while (order := self._next.pop(model, None)) is not None:
            self._now[model] = order
            self._newer[model].clear()
            try:
                await self._carry_out(order, taken)
            except TransportError as error:  # the coordinator repeats the order when this device attends again
                log.warning("release_not_reported", model=model, reason=log_text(str(error)))
            except Exception:  # a fault of the daemon must not end it: it trains too
                log.exception("release_broken", model=model)
            finally:
                del self._now[model]

    async def _carry_out(self, order: pb.ReleaseOrder, taken: Taken) -> None:
        before, report = self._answered.pop(order.model, (None, None))
        if report is not None and before == order:  # nothing was installed since
            self._answered[order.model] = order, report
            await self._services.link.ask(report, pb.ReportReleaseResponse)
            return
        try:
            installed = await self._installed(order, taken)
            await self._report(order, pb.RELEASE_OUTCOME_INSTALLED)
            if installed is not None:
                await self._evaluate(order, installed, taken)
        except Refused as error:
            await self._report(order, pb.RELEASE_OUTCOME_REFUSED, str(error))
        except (NotTaken, WorkFailed, OSError) as error:
            await self._report(order, pb.RELEASE_OUTCOME_FAILED, str(error))

    # Installing.

    async def _installed(self, order: pb.ReleaseOrder, taken: Taken) -> Installed | None:
        """Install the version, and let the owner's program take it. Raises Refused, NotTaken, OSError."""
        folder, model = taken.folder, order.model
        earlier = await asyncio.to_thread(folder.current, model)
        installed = None
        if order.version:
            description = self._checked(order, taken)
            installed = await asyncio.to_thread(folder.find, description)
            if installed is None:
                data = await self._fetched(description)
                signed = (order.description, order.signature)
                installed = await asyncio.to_thread(folder.add, description, signed, data)
        await asyncio.to_thread(folder.use, model, installed)
        try:
            await announced(model, installed, taken)
        except NotTaken:
            if installed is not None:  # a model that was withdrawn stays so
                await asyncio.to_thread(folder.use, model, earlier)
                with suppress(NotTaken):
                    await announced(model, earlier, taken)
            raise
        if installed is not None:
            await asyncio.to_thread(folder.clear, model)
        return installed

    def _checked(self, order: pb.ReleaseOrder, taken: Taken) -> Description:
        """The description of an order. Raises Refused unless it is signed, and for this device."""
        try:
            check_signature(taken.config.signers, order.description, order.signature)
            description = parse_description(order.description)
        except (WrongSignature, ValueError) as error:
            raise Refused(str(error)) from error
        here, trainer = (description.model, description.version), self._trainer_of(description, taken)
        expected = {
            f"the description of {order.model} {order.version}": here == (order.model, order.version),
            "a model of a task that this device serves, for labels that it has": trainer is not None,
            f"a version of at least {taken.config.oldest} (releases.oldest)": description.version
            >= taken.config.oldest,
            f"at most {taken.max_bytes} bytes (max_bundle_bytes)": description.size <= taken.max_bytes,
        }
        if wrong := next((what for what, holds in expected.items() if not holds), None):
            got = f"{here[0]} {here[1]}, task {description.task!r}, labels {description.labels}, {description.size} B"
            raise Refused(f"expected {wrong}, got {got}")
        return description

    def _trainer_of(self, description: Description, taken: Taken) -> Trainer | None:
        """The trainer of the first data that a release is for; None: it is for none of this device."""
        return next(
            (
                trainer
                for trainer in self._services.trainers
                if trainer.own_evaluation().task == description.task
                and description.fits({**taken.labels, **trainer.local.labels})
            ),
            None,
        )

    async def _fetched(self, description: Description) -> memoryview:
        """The checked bytes of all files. Raises Refused, NotTaken."""
        services, digest = self._services, digest_message(bytes.fromhex(description.digest))
        expected = ExpectedBytes(digest, description.size)
        for _ in range(TRIES):
            data = zeros(description.size)
            download = Download(expected, data, Backoff(services.link.delays), services.metrics.bytes_received)
            try:
                await services.link.call_with_retry(download.resume, download.backoff)
            except ValueError as error:
                raise NotTaken(str(error)) from error
            if await asyncio.to_thread(_right, description, data):
                return data
        raise Refused(f"expected bytes with the digest {description.digest}, got others {TRIES} times")

    # Evaluating.

    async def _evaluate(self, order: pb.ReleaseOrder, installed: Installed, taken: Taken) -> None:
        """Evaluate the version and the one before it, and report. A newer order ends it."""
        newer = asyncio.ensure_future(self._newer[order.model].wait())
        work = asyncio.ensure_future(self._measured(installed, taken))
        try:
            await asyncio.wait({work, newer}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return
            found = work.result()
            await self._report(order, pb.RELEASE_OUTCOME_EVALUATED, **found)
        except PolicyRefused as error:
            await self._report(order, pb.RELEASE_OUTCOME_NOT_EVALUATED, str(error))
        finally:
            newer.cancel()
            work.cancel()

    async def _measured(self, installed: Installed, taken: Taken) -> dict[str, Any]:
        """What a report has of the evaluation. Raises PolicyRefused if there is none, WorkFailed."""
        if (evaluation := await asyncio.to_thread(installed.evaluation)) is not None:
            return evaluation
        policy, said = self._services.policy, installed.description
        trainer = self._trainer_of(said, taken)
        if trainer is None or not (examples := len(trainer.local.held_out)):
            raise PolicyRefused("share", "this device has no held-out examples")
        if not policy.policy.share.evaluations:
            raise PolicyRefused("share", "this site shares no evaluations")
        assignment = trainer.own_evaluation()
        assignment.key.run_id = said.run
        assignment.personal.extend(said.personal)
        await policy.check_evaluation(assignment)
        earlier = await asyncio.to_thread(taken.folder.before, said.model)
        await policy.begin_evaluation(assignment, examples)
        metrics = partial(self._metrics, trainer, assignment)
        evaluation = {"num_examples": examples, "metrics": await metrics(installed)}
        if earlier is not None and earlier.version < installed.version:
            with suppress(WorkFailed):  # without a value of before, nothing fell
                evaluation["metrics_before"] = await metrics(earlier)
        await asyncio.to_thread(installed.keep_evaluation, evaluation)
        return evaluation

    async def _metrics(
        self, trainer: Trainer, assignment: EvaluationAssignment, version: Installed
    ) -> dict[str, float]:
        """The means over the held-out examples. Waits for the owner's gates. Raises WorkFailed."""
        services, state = self._services, None
        if assignment.personal:
            state = await services.state.required(services.storage.latest_state, assignment)
        measure = partial(trainer.evaluate_file, assignment, version.weights, state)
        while True:
            try:
                async with services.availability.while_allowed():
                    return (await self._executor.compute(lambda check: measure())).metrics
            except WorkFailed as error:
                if error.reason != pb.FAILURE_REASON_STOPPED:
                    raise
                await asyncio.sleep(AGAIN_S)

    # Reporting.

    async def _report(
        self, order: pb.ReleaseOrder, outcome: pb.ReleaseOutcome, detail: str = "", **measured: Any
    ) -> None:
        """Tell the coordinator, the log and the owner's audit log. Raises TransportError."""
        name = pb.ReleaseOutcome.Name(outcome).removeprefix("RELEASE_OUTCOME_").lower()
        report = pb.ReportReleaseRequest(
            model=order.model, version=order.version, outcome=outcome, detail=log_text(detail), **measured
        )
        write = log.info if not detail else log.warning
        write("release", model=order.model, version=order.version, outcome=name, detail=log_text(detail), **measured)
        self._services.audit.note(f"release_{name}", f"{order.model}/{order.version}", detail=log_text(detail))
        self._services.metrics.releases.labels(name).inc()
        if outcome != pb.RELEASE_OUTCOME_INSTALLED or not order.version:
            self._answered[order.model] = order, report
        await self._services.link.ask(report, pb.ReportReleaseResponse)


def _right(description: Description, data: memoryview) -> bool:
    """Whether bytes are those of the description, as a whole and file by file."""
    if blake3(data).hexdigest() != description.digest:
        return False
    spans = ((file, description.span(file.name)) for file in description.files)
    return all(blake3(data[start : start + size]).hexdigest() == file.digest for file, (start, size) in spans)
