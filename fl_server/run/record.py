"""The tasks, timers and ledger calls of one run, and its row in the ledger, which only this module replaces.

No task or timer is left when the run is closed. The row has the run's state, and why it makes no progress.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import structlog

from fl_common.waiting import shielded
from fl_server.rounds import events as ev
from fl_server.rounds.effects import RestartRound
from fl_server.rounds.state import Phase, RoundState
from fl_server.run.context import RunContext
from fl_server.run.progress import Progress
from fl_server.store.errors import StoreError
from fl_server.store.ledger import Ledger, write_when_possible
from fl_server.store.records import HistoryRecord, RunRecord

log = structlog.get_logger()
P = ParamSpec("P")
R = TypeVar("R")


class RunTasks(ABC):
    """A run's work that goes on beside its events, and its calls of the ledger. Lives on the event loop."""

    state: RoundState
    """The state of the round state machine."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[type[ev.Event] | ev.Event, asyncio.TimerHandle] = {}

    @abstractmethod
    def post(self, event: ev.Event) -> None:
        """Take the event of a timer that is due."""

    @abstractmethod
    def task_failed(self, error: Exception) -> None:
        """A task has ended with an exception."""

    @property
    @abstractmethod
    def end_reason(self) -> str:
        """Why the run has ended, and how to go on; empty before its end."""

    @abstractmethod
    def writing_failed(self, why: str) -> None:
        """A write failed for this reason and will be tried again; "" when a later attempt succeeds."""

    async def write(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a writing method of the store. Retries while the disk is full or the database is away."""
        return await self.retry(lambda: self._ledger.do(method, *args, **kwargs))

    async def read(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a reading method of the store, with the same retries."""
        return await self.write(method, *args, **kwargs)

    async def retry(self, work: Callable[[], Awaitable[R]]) -> R:
        """Await any other work that needs the disk or the ledger, with the same retries."""
        return await write_when_possible(self.writing_failed, work)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that runs until the run closes. An exception in it fails the run."""
        task = self._start(self._guard(work))
        task.add_done_callback(lambda _: work.close())  # one that was cancelled before it began
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the run fails with it
            self.task_failed(error)

    def ensure(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start a task, unless one of that name runs already."""
        if name in self._running and not self._running[name].done():
            work.close()
        else:
            self._running[name] = self.spawn(work)

    async def to_the_end(self, work: Coroutine[Any, Any, R]) -> R:
        """Do work to its end: also if the call that asked for it is cancelled. Its exceptions go to the caller."""
        return await shielded(self._start(work))

    def _start(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def set_timer(self, seconds: float, event: ev.Event, *, alone: bool = True) -> None:
        """Post an event after a delay, in place of an earlier timer for an event of the same type.

        alone: otherwise, in place of one for the same event.
        """
        kind = type(event) if alone else event
        self.stop_timer(kind)
        self._timers[kind] = asyncio.get_running_loop().call_later(seconds, self.post, event)

    def stop_timer(self, kind: type[ev.Event] | ev.Event) -> None:
        """Stop the timer for events of that type, or for that event, if one is set."""
        if timer := self._timers.pop(kind, None):
            timer.cancel()

    async def end_tasks(self) -> None:
        """End all timers and tasks."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class RunStatus:
    """Follows the run's state, and what cannot be written. Lives on the event loop."""

    def __init__(self, context: RunContext, run: RunTasks, record: RunRecord) -> None:
        self._context, self._run = context, run
        self.record = record
        """The run's row in the ledger, as it is written next."""
        self.waiting_reason = ""
        """Why the run makes no progress; empty while it does."""
        self._most_present = 0
        """The most clients at a time in this wait that could be drawn."""
        self.write_failure = self._reason_before_failure = ""
        """Why nothing can be written, empty while it can; and the `waiting_reason` from before."""
        self.upload_failure = ""
        """Why an upload could not be stored; empty once one is, or when no upload is wanted any more."""
        self.since = time.time()
        """Unix time at which the run came into its status, or was restored in it."""
        self._noted = self.current

    @property
    def current(self) -> str:
        """One of "waiting", "running", "paused", "completed", "stopped" or "failed"."""
        status = self._to_store
        return "waiting" if status == "running" and self.upload_failure else status

    @property
    def _to_store(self) -> str:
        """The status without the failures of uploads: nothing is written about a full disk."""
        state = self._run.state
        if state.phase is Phase.ENDED and state.ending is not None:
            return state.ending[0]
        if state.paused:
            return "paused"
        return "waiting" if self.waiting_reason else "running"

    async def save(self, event: str = "", told: str = "") -> None:
        """Write status and waiting reason to the ledger, with a line of history if `event` names one.

        told: the reason for history and watchers, if it says more than the one that is kept.
        """
        self._note()
        context, run, ended = self._context, self._run, self._run.state.phase is Phase.ENDED
        reason = run.end_reason if ended else self.waiting_reason
        ended_at = time.time() if ended else None
        down, up = context.rounds.bytes.total
        record = replace(self.record, state=self._to_store, reason=reason, ended_at=ended_at)
        self.record = replace(record, bytes_down=down, bytes_up=up, elapsed_s=run.state.elapsed_s)
        why = HistoryRecord(time.time(), "coordinator", event, context.run_id, told or reason) if event else None
        await run.write(context.store.update_run, self.record, why)
        context.watchers.publish(Progress("state", told or reason))

    async def save_if_changed(self) -> None:
        """Write the status to the ledger if the ledger has another one."""
        if self.record.state != self._to_store:
            await self.save()

    async def save_usage(self) -> None:
        """Write the bytes that the run has sent and received, and the time that it has used; without retries."""
        down, up = self._context.rounds.bytes.total
        counted = replace(self.record, bytes_down=down, bytes_up=up, elapsed_s=self._run.state.elapsed_s)
        if counted == self.record:
            return
        self.record, ledger, store = counted, self._context.services.ledger, self._context.store
        try:
            await ledger.do(store.set_usage, counted.run_id, counted.elapsed_s, down, up)
        except StoreError as error:
            log.warning("usage_not_written", run=counted.run_id, error=str(error))

    async def restart_round(self, effect: RestartRound, why: HistoryRecord) -> None:
        """Write that a round is redrawn, and the epoch of the client states."""
        record = replace(self.record, state_epoch=effect.state_epoch)
        await self._run.write(self._context.store.restart_round, record, effect.round, why, effect.past_draws)
        self.record = record

    async def request(self, why: HistoryRecord, record: RunRecord | None = None) -> None:
        """Write an operator's request, with the row that it changes; without retries. Raises StoreError."""
        ledger, store = self._context.services.ledger, self._context.store
        if record is None:
            await ledger.do(store.add_history, why)
        else:
            await ledger.do(store.update_run, record, why)
            self.record = record

    def change(self, **changes: Any) -> None:
        """Change fields that the next write of the row has."""
        self.record = replace(self.record, **changes)

    def waits(self, reason: str, present: int) -> bool:
        """The run makes no progress. Returns False if that is known; else the caller saves it.

        present: the clients that could be drawn. Known is also that fewer are: clients that come and go, and work for
        other runs, would fill the history of a run that waits.
        """
        known, self.waiting_reason = self.waiting_reason, reason
        if known and present <= self._most_present:
            if reason != known:
                self._context.watchers.publish(Progress("phase", self._run.state.phase.value))
            return False
        self._most_present = present
        return True

    async def goes_on(self) -> None:
        """The run makes progress."""
        if self.waiting_reason:
            self.waiting_reason = ""
            await self.save("run_goes_on")

    def committed(self) -> None:
        """A round is committed. The status is written with the next event."""
        self.waiting_reason = ""

    async def ended(self, status: str) -> None:
        """Write the end of the run."""
        self.waiting_reason = ""
        await self.save(f"run_{status}")

    def writing_failed(self, why: str) -> None:
        """The disk is full or read-only, or the database is away; `why` is "" once it works again.

        The work is tried again, and nothing is lost.
        """
        context, run = self._context, self._run
        if why:
            if not self.write_failure:
                self._reason_before_failure = self.waiting_reason
            self.write_failure, self.waiting_reason = why, f"the coordinator cannot write: {why}"
            log.error("no_room", run=context.run_id, round=run.state.round, error=why)
            run.spawn(context.services.free_disk_space())
        elif self.write_failure:
            log.info("room_again", run=context.run_id, round=run.state.round)
            detail = f"before: {self.waiting_reason}"
            self.write_failure, self.waiting_reason = "", self._reason_before_failure
            entry = HistoryRecord(time.time(), "coordinator", "run_goes_on", context.run_id, detail)
            run.spawn(run.write(context.store.add_history, entry))
        self._note()
        context.watchers.publish(Progress("state", self.waiting_reason))

    def upload_failed(self, why: str) -> None:
        """An upload could not be stored. The client sends it again, so nothing of the run waits for the disk."""
        if not (self.upload_failure or self.write_failure):
            log.warning("uploads_not_stored", run=self._context.run_id, round=self._run.state.round, error=why)
            self._set_upload_failure(f"the coordinator cannot store updates: {why}")

    def upload_stored(self) -> None:
        """An upload was stored, or no upload is wanted any more."""
        if self.upload_failure:
            log.info("uploads_stored_again", run=self._context.run_id, round=self._run.state.round)
            self._set_upload_failure("")

    def _set_upload_failure(self, why: str) -> None:
        self.upload_failure = why
        self._note()
        self._context.watchers.publish(Progress("state", why or self.waiting_reason))

    def _note(self) -> None:
        if self.current != self._noted:
            self._noted, self.since = self.current, time.time()
