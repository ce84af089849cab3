"""What lies on a device's desk: the coordinator's events come in, tasks are started, kept and ended.

One task for each assignment. It outlives connections and sessions, and ends with a receipt, a failure report, or when
it is cancelled. A repeat of an assignment finds its task, or the update that was kept: nothing is trained twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from fl_client.assignments.checks import UnusableEvent, checked_key, checked_outcome, checked_run
from fl_client.assignments.clock import Clock, seconds_for
from fl_client.assignments.reports import Reports
from fl_client.connection.reading import text
from fl_client.errors import WorkFailed
from fl_client.updates import Assigned, Key, key_of, message_of, name_of, work_of
from fl_client.work import Tools, Work, named
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2

log = structlog.get_logger()

CHANGES = 256
"""Changes on disk that wait at most; until one is done, no event is asked for."""


@dataclass(frozen=True, slots=True)
class _Job:
    work: bytes
    task: asyncio.Task[None]
    clock: Clock


Jobs = dict[Key, _Job]

T = TypeVar("T")


class Desk:
    """Takes the coordinator's events, and starts, goes on with and ends the tasks that answer them."""

    def __init__(self, tools: Tools, tasks: asyncio.TaskGroup) -> None:
        self._reports = Reports(tools.link, tools.gatekeeper)
        self._work = Work(tools, self._reports)
        self._limits, self._attended = tools.limits, False
        self._disk, self._shelf = tools.disk, tools.shelf
        self._metrics, self._progress = tools.metrics, tools.progress
        self._tasks = tasks
        self._training: Jobs = {}
        self._evaluating: Jobs = {}
        self._cleared = False
        self._changes = asyncio.Semaphore(CHANGES)
        self._sending = tasks.create_task(self._reports.send())

    def take(self, event: pb.AttendResponse) -> None:
        """Act on one event; one that cannot be used is passed over."""
        kind = event.WhichOneof("event")
        try:
            self._take(event)
        except UnusableEvent as error:
            self._metrics.ignored.inc()
            log.warning("event_ignored", kind=kind, reason=text(str(error)))
        except Exception:  # a fault of ours must not end a daemon that has other events to take
            self._metrics.ignored.inc()
            log.exception("event_broken", kind=kind)

    async def ready(self) -> None:
        """Wait until there is room for what the next event may ask."""
        async with self._changes:
            pass

    def _take(self, event: pb.AttendResponse) -> None:
        match event.WhichOneof("event"):
            case "assignment":
                self._start(self._training, event.assignment, self._work.contribute)
            case "evaluation":
                self._start(self._evaluating, event.evaluation, self._work.evaluate)
            case "cancel":
                self._cancel(checked_key(event.cancel.key), name_of(training_pb2.RefusalReason, event.cancel.reason))
            case "outcome":
                self._settle(event.outcome)
            case "run_ended":
                self._end(checked_run(event.run_ended.run_id))

    async def pending(self) -> list[training_pb2.ExchangeKey]:
        """Keys of the updates whose outcome has not been heard, those that are still being made included.

        So a daemon that was away while its round ended is told that nobody waits for its work any more.
        """
        kept = await self._disk.run(self._shelf.unsettled)
        making = self._training.keys() - {key_of(key) for key in kept}
        return kept + [message_of(key) for key in sorted(making)]

    async def states(self) -> list[pb.HeldState]:
        """The runs that client states are kept for."""
        return await self._disk.run(self._shelf.held)

    def attached(self) -> None:
        """The coordinator's stream is open."""
        self._count(True)
        self._metrics.attached.set(1)
        self._metrics.connects.labels("attached").inc()
        self._say_idle("waiting for work")

    def disconnected(self) -> None:
        """The stream is closed. Work goes on, and its deadlines stand still."""
        self._count(False)
        self._metrics.attached.set(0)
        self._metrics.connects.labels("failed").inc()
        self._say_idle("not connected, trying again")

    def clear(self) -> None:
        """End all work, and begin none any more; nothing is reported."""
        self._cleared = True  # what is pushed until the connection is closed would never end without it
        self._sending.cancel()
        for job in (*self._training.values(), *self._evaluating.values()):
            job.task.cancel()

    def _start(self, jobs: Jobs, assignment: Assigned, answer: Callable[[Assigned], Awaitable[None]]) -> None:
        """Begin to work on an assignment, unless that very work is being done."""
        if self._cleared:
            return
        key, work = checked_key(assignment.key), work_of(assignment)
        seconds = seconds_for(assignment, self._limits.max_seconds)
        if (job := jobs.get(key)) is not None:
            if job.work == work:
                job.clock.give(seconds)
                return
            job.task.cancel()
        if self._reports.holds(key, work):
            return
        self._reports.forget(key)
        if jobs is self._training:
            self._end_earlier(key)
        clock = Clock(seconds, running=self._attended)
        task = self._tasks.create_task(self._work.see_through(key, work, clock, partial(answer, assignment)))
        jobs[key] = _Job(work, task, clock)
        task.add_done_callback(partial(self._done, jobs, key))
        self._make_room(jobs)

    def _make_room(self, jobs: Jobs) -> None:
        """The newest is what a coordinator wants; of too many the oldest is given up."""
        while len(jobs) > self._limits.max_assignments:
            key = next(iter(jobs))
            job = jobs.pop(key)
            job.task.cancel()
            most = self._limits.max_assignments
            failure = WorkFailed(
                pb.FAILURE_REASON_RESOURCES,
                f"expected at most {most} assignments at once (limits.max_assignments), the oldest is given up",
            )
            self._work.give_up(key, job.work, failure)

    def _count(self, attended: bool) -> None:
        self._attended = attended
        for job in (*self._training.values(), *self._evaluating.values()):
            job.clock.run(attended)

    def _end_earlier(self, key: Key) -> None:
        """Whether or not we were told: what the run wanted before this is over."""
        for earlier, job in self._training.items():
            if earlier[0] == key[0] and earlier < key:
                job.task.cancel()

    def _done(self, jobs: Jobs, key: Key, task: asyncio.Task[None]) -> None:
        if key in jobs and jobs[key].task is task:
            del jobs[key]
            self._say_idle("waiting for work")

    def _cancel(self, key: Key, reason: str) -> None:
        """Stop working for a key, and forget what was computed."""
        for job in (self._training.get(key), self._evaluating.get(key)):
            if job is not None:
                job.task.cancel()
        self._later(self._shelf.drop, key)
        log.info("cancelled", **named(key), reason=reason)

    def _settle(self, outcome: training_pb2.Outcome) -> None:
        """What became of an update: there is nothing left to send."""
        key = checked_outcome(outcome)
        if not outcome.counted and key in self._training:
            self._training[key].task.cancel()
        self._later(self._shelf.settle, outcome)
        reason = None if outcome.counted else name_of(training_pb2.RefusalReason, outcome.reason)
        log.info("outcome", **named(key), counted=outcome.counted, reason=reason)

    def _end(self, run_id: str) -> None:
        """A run is over: its work ends, and what is kept for it goes."""
        for jobs in (self._training, self._evaluating):
            for key, job in jobs.items():
                if key[0] == run_id:
                    job.task.cancel()
        self._later(self._shelf.end, run_id)
        log.info("run_ended", run=run_id)

    def _later(self, change: Callable[[T], None], what: T) -> None:
        """Change what is on disk, behind what was asked for before."""
        self._tasks.create_task(self._change(change, what))

    async def _change(self, change: Callable[[T], None], what: T) -> None:
        async with self._changes:
            try:
                await self._disk.run(change, what)
            except OSError as error:  # the next assignment of the run says again what has counted
                log.error("state_dir_failed", change=change.__name__, reason=str(error))
            except Exception:  # a fault of ours must not end a daemon that trains for other rounds too
                log.exception("change_broken", change=change.__name__)

    def _say_idle(self, what: str) -> None:
        if not self._training and not self._evaluating:
            self._progress.say(what)
