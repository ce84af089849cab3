"""The tasks and timers of one run. None of them is left when the run is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fl_server.rounds import events as ev

R = TypeVar("R")


class RunTasks:
    """Starts and ends them. Lives on the event loop."""

    def __init__(self, failed: Callable[[Exception], None], post: Callable[[ev.Event], None]) -> None:
        """`failed`: called with an exception of a task. `post`: called with the event of a timer that is due."""
        self._failed, self._post = failed, post
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[type[ev.Event], asyncio.TimerHandle] = {}

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that runs until the run closes. An exception in it fails the run."""
        task = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # one that was cancelled before it began
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the run fails with it
            self._failed(error)

    def ensure(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task, unless one of that name runs already."""
        if name not in self._running or self._running[name].done():
            self._running[name] = self.spawn(work())

    async def to_the_end(self, work: Coroutine[Any, Any, R]) -> R:
        """Do work to its end: also if the call that asked for it is cancelled. Its exceptions go to the caller."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may be gone
        return await asyncio.shield(task)

    def set_timer(self, seconds: float, event: ev.Event) -> None:
        """Post an event after a delay, in place of an earlier timer for an event of the same type."""
        self.stop_timer(type(event))
        self._timers[type(event)] = asyncio.get_running_loop().call_later(seconds, self._post, event)

    def stop_timer(self, kind: type[ev.Event]) -> None:
        """Stop the timer for events of that type, if one is set."""
        if timer := self._timers.pop(kind, None):
            timer.cancel()

    async def close(self) -> None:
        """End all timers and tasks."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
