"""Handles the coordinator's events: starts, repeats and ends the tasks that execute assignments.

There is one task for each assignment. It outlives connections and sessions. It ends with a receipt, a failure report,
or its cancellation. A repeated assignment finds its task or its saved update: nothing is trained twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from fl_client.assignments.checks import InvalidEvent, checked_key, checked_outcome, checked_run
from fl_client.assignments.deadline import DeadlineTimer, seconds_for
from fl_client.assignments.executor import AssignmentExecutor, Services
from fl_client.assignments.releases import Releases
from fl_client.assignments.reports import FailureReports
from fl_client.audit.log import subject_of
from fl_client.connection.messages import log_text
from fl_client.errors import beyond_limits
from fl_client.storage.pending_updates import Assigned, Key, key_fields, key_of, message_of, name_of, work_digest
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2

log = structlog.get_logger()

MAX_CHANGES = 256
"""Changes on disk that may wait. Beyond it no event is requested until one is done."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pauses before a change that the disk did not take is tried again; twice as long each time."""


@dataclass(frozen=True, slots=True)
class _Job:
    work_digest: bytes
    task: asyncio.Task[None]
    timer: DeadlineTimer


Jobs = dict[Key, _Job]

T = TypeVar("T")


class AssignmentManager:
    """Handles events, and owns the tasks that execute assignments. An EventHandler of the session manager."""

    def __init__(self, services: Services, tasks: asyncio.TaskGroup) -> None:
        self._failures = FailureReports(services.link, services.availability)
        self._executor = AssignmentExecutor(services, self._failures)
        self._services, self._tasks, self._attended = services, tasks, False
        self._training: Jobs = {}
        self._evaluating: Jobs = {}
        self._stopped = asyncio.Event()
        self._ended: set[str] = set()
        """Runs that have ended, and whose files are not removed yet."""
        self._changes = asyncio.Semaphore(MAX_CHANGES)
        self._reporting = tasks.create_task(self._failures.run())
        self._releases = Releases(services, self._executor, tasks)

    def handle(self, event: pb.AttendResponse) -> None:
        """Act on one event. An event that is not valid is ignored."""
        kind = event.WhichOneof("event")
        try:
            self._handle(event)
        except InvalidEvent as error:
            self._services.metrics.ignored.inc()
            log.warning("event_ignored", kind=kind, reason=log_text(str(error)))
        except Exception:  # a fault of the daemon must not end it: it has other events to handle
            self._services.metrics.ignored.inc()
            log.exception("event_broken", kind=kind)

    async def ready(self) -> None:
        """Wait until the changes on disk are below their limit."""
        async with self._changes:
            pass

    def _handle(self, event: pb.AttendResponse) -> None:
        match event.WhichOneof("event"):
            case "assignment":
                self._start(self._training, event.assignment, self._executor.train_and_submit)
            case "evaluation":
                self._start(self._evaluating, event.evaluation, self._executor.evaluate)
            case "stage":
                checked_key(event.stage.key)
                if not self._stopped.is_set():
                    self._tasks.create_task(self._executor.answer_stage(event.stage))
            case "cancel":
                self._cancel(checked_key(event.cancel.key), name_of(training_pb2.RefusalReason, event.cancel.reason))
            case "outcome":
                self._settle(event.outcome)
            case "release" | "package":
                self._take_offer(event)
            case "run_ended":
                self._end_run(checked_run(event.run_ended.run_id))

    def _take_offer(self, event: pb.AttendResponse) -> None:
        """A released model or a package, which this device fetches if its owner lets it."""
        if event.HasField("package"):
            self._services.packages.offered(event.package)
        elif not self._stopped.is_set():
            self._releases.order(event.release)

    async def pending_updates(self) -> list[training_pb2.ExchangeKey]:
        """Keys of the updates with an unknown outcome, those in training included.

        So a daemon that was away while its round ended learns that its update is not needed any more.
        """
        saved = await self._services.disk.run(self._services.storage.pending_keys)
        in_training = self._training.keys() - {key_of(key) for key in saved}
        return saved + [message_of(key) for key in sorted(in_training)]

    async def client_states(self) -> list[pb.HeldState]:
        """The runs with a client state."""
        return await self._services.disk.run(self._services.storage.held_states)

    def attached(self) -> None:
        """The coordinator's stream is open."""
        self._set_attended(True)
        self._services.metrics.attached.set(1)
        self._services.metrics.refused.set(0)
        self._services.metrics.connects.labels("attached").inc()
        self._show_idle("waiting for work")

    def disconnected(self, *, refused: bool) -> None:
        """The stream is closed. Work continues, and its deadlines stop.

        refused: the coordinator refuses this device: it is banned, or its certificate is revoked.
        """
        self._services.metrics.refused.set(int(refused))
        self._set_attended(False)
        self._services.metrics.attached.set(0)
        self._services.metrics.connects.labels("failed").inc()
        self._show_idle("not connected, trying again")

    def stop(self) -> None:
        """End all work without reports, and start none."""
        self._stopped.set()  # assignments may still be pushed until the connection is closed
        self._reporting.cancel()
        self._releases.stop()
        for job in (*self._training.values(), *self._evaluating.values()):
            job.task.cancel()

    def _start(self, jobs: Jobs, assignment: Assigned, work: Callable[[Assigned], Awaitable[None]]) -> None:
        """Start to execute an assignment, unless the same work is in progress."""
        if self._stopped.is_set():
            return
        key, digest = checked_key(assignment.key), work_digest(assignment)
        seconds = seconds_for(assignment, self._services.limits.max_seconds)
        if (job := jobs.get(key)) is not None:
            if job.work_digest == digest:
                job.timer.restart(seconds)
                if isinstance(assignment, training_pb2.Assignment) and assignment.HasField("secure_aggregation"):
                    self._tasks.create_task(self._executor.repeat_keys(assignment))
                return
            job.task.cancel()
        if self._failures.is_waiting(key, digest):
            return
        self._failures.remove(key)
        self._ended.discard(key[0])  # an operator has extended it
        if jobs is self._training:
            self._end_earlier(key)
        timer = DeadlineTimer(seconds, running=self._attended)
        task = self._tasks.create_task(self._executor.handle_errors(key, digest, timer, partial(work, assignment)))
        jobs[key] = _Job(digest, task, timer)
        task.add_done_callback(partial(self._done, jobs, key))
        self._limit(jobs)

    def _limit(self, jobs: Jobs) -> None:
        """Give up the oldest assignments beyond the limit: a coordinator needs the newest."""
        limit = self._services.limits.max_assignments
        while len(jobs) > limit:
            key = next(iter(jobs))
            job = jobs.pop(key)
            job.task.cancel()
            failure = beyond_limits(
                f"expected at most {limit} assignments at once (limits.max_assignments), the oldest is given up"
            )
            self._executor.report_failure(key, job.work_digest, failure)

    def _set_attended(self, attended: bool) -> None:
        self._attended = attended
        for job in (*self._training.values(), *self._evaluating.values()):
            job.timer.set_running(attended)

    def _end_earlier(self, key: Key) -> None:
        """End the run's earlier assignments. They are over, also where their cancellation did not arrive."""
        for earlier, job in self._training.items():
            if earlier[0] == key[0] and earlier < key:
                job.task.cancel()

    def _done(self, jobs: Jobs, key: Key, task: asyncio.Task[None]) -> None:
        if key in jobs and jobs[key].task is task:
            del jobs[key]
            self._show_idle("waiting for work")

    def _cancel(self, key: Key, reason: str) -> None:
        """End the training for a key, and remove its update.

        An evaluation of the model that was made in that round goes on: with a buffer the training may be cancelled
        after it, and the coordinator waits for the report.
        """
        if (job := self._training.get(key)) is not None:
            job.task.cancel()
        self._services.secure.forget(key)
        self._change_later(self._services.storage.drop, key)
        log.info("cancelled", **key_fields(key), reason=reason)
        self._services.audit.note("cancelled", subject_of(key), reason.lower())

    def _settle(self, outcome: training_pb2.Outcome) -> None:
        """Handle the outcome of an update, which ends its work.

        Work that counts may have been assigned once more before, to a device that came back: it is over as well.
        """
        key = checked_outcome(outcome)
        self._services.secure.forget(key)
        if key in self._training:
            self._training[key].task.cancel()
        self._change_later(self._services.storage.settle, outcome)
        reason = None if outcome.counted else name_of(training_pb2.RefusalReason, outcome.reason)
        log.info("outcome", **key_fields(key), counted=outcome.counted, reason=reason)
        self._services.audit.note("outcome", subject_of(key), "counted" if reason is None else reason.lower())

    def _end_run(self, run_id: str) -> None:
        """End the work of a run, and remove its files."""
        for jobs in (self._training, self._evaluating):
            for key, job in jobs.items():
                if key[0] == run_id:
                    job.task.cancel()
        self._ended.add(run_id)
        self._change_later(self._remove_files, run_id)
        log.info("run_ended", run=run_id)
        self._services.audit.note("run_ended", run_id)

    def _remove_files(self, run_id: str) -> None:
        """Remove the files of a run, unless it goes on. Raises OSError, as every change."""
        if run_id in self._ended:
            self._services.storage.end_run(run_id)
            self._ended.discard(run_id)

    def _change_later(self, change: Callable[[T], None], argument: T) -> None:
        """Change the files on disk, after all changes that were requested before."""
        self._tasks.create_task(self._change(change, argument))

    async def _change(self, change: Callable[[T], None], argument: T) -> None:
        """Change the files. Changes that come late do no harm, so what the disk does not take is tried again."""
        pause = FIRST_PAUSE_S
        async with self._changes:
            while await self._is_refused(change, argument, pause) and not self._stopped.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._stopped.wait()
                pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _is_refused(self, change: Callable[[T], None], argument: T, pause: float) -> bool:
        """Whether the disk does not take a change, which is tried again after a pause in seconds."""
        name = change.__name__.lstrip("_")
        try:
            await self._services.state.run(change, argument)
        except OSError as error:
            log.error("state_dir_failed", change=name, reason=str(error), next_try_seconds=pause)
            return True
        except Exception:  # a fault of the daemon must not end it: it trains for other rounds too
            log.exception("change_broken", change=name)
        return False

    def _show_idle(self, activity: str) -> None:
        if not self._training and not self._evaluating:
            self._services.progress.show(activity)
