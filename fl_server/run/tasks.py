"""The tasks, the timers and the ledger calls of one run. No task or timer is left when the run is closed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from fl_server.rounds import events as ev
from fl_server.rounds.state import RoundState
from fl_server.store.ledger import Ledger, write_when_possible

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
        task = self._start(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may be gone
        return await asyncio.shield(task)

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
