"""An event loop with a virtual clock, and simulated processes that share it.

Nothing waits: when no callback is ready, the clock moves to the next timer. A process is a context variable: each task,
timer and callback belongs to the process in whose context it was made. After a SIGKILL no callback of the process runs
any more, and its objects are kept until the life is over, so that no destructor has an effect.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

MOST_STEPS = 300_000
"""Callbacks of one life. More of them mean an endless loop without progress of the clock."""


class Killed(BaseException):
    """The process of the running code is dead. A BaseException, so that no handler continues after it."""


class StuckLoop(Exception):
    """The loop turns without an end."""


class Process:
    """One process between its start and its end."""

    def __init__(self, name: str, epoch: float = 0.0) -> None:
        """epoch: Unix seconds that its clock shows at virtual time 0."""
        self.name, self.epoch, self.alive = name, epoch, True
        self.on_kill: list[Callable[[], None]] = []
        """What the kernel does when the process ends: close connections, release locks."""
        self.tasks: list[asyncio.Task[Any]] = []

    def kill(self) -> None:
        """SIGKILL. A second call does nothing."""
        if self.alive:
            self.alive = False
            for release in self.on_kill:
                release()

    def context(self) -> Context:
        """A new context of the process."""
        context = copy_context()
        context.run(CURRENT.set, self)
        return context

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task of the process."""
        task = asyncio.get_running_loop().create_task(work, context=self.context())
        self.tasks.append(task)
        return task


CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)
"""The process of the running code; None: of the simulation itself."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that never waits. Executors run their functions on it, later by a random time."""

    _ready: deque[asyncio.Handle]

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.now = 0.0
        self.timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        """A heap: of two timers of the same time the first one comes first."""
        self._count = 0
        self.random = random.Random(f"executors {seed}")
        self.errors: list[dict[str, Any]] = []
        """What the loop's exception handler got."""
        self.steps = 0
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        return self.now

    def _check_closed(self) -> None:
        """What is left of dead processes may still call a loop that is over; nothing of it runs."""

    def _write_to_self(self) -> None:
        """Nothing waits that had to be woken."""

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is left out when its time comes."""

    def _run_once(self) -> None:
        """Run what is ready, and move the clock to the next timer if nothing is."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise StuckLoop(f"the clock goes on: {MOST_STEPS} turns of the loop, at {self.now:g} s")
        ready, timers = self._ready, self.timers
        while timers and (timers[0][2].cancelled() or timers[0][0] <= self.now or not ready):
            when, _, timer = heapq.heappop(timers)
            if not timer.cancelled():
                self.now = max(self.now, when)
                ready.append(timer)
        assert ready
        for _ in range(len(ready)):
            handle: Any = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(CURRENT)
            if process is None or process.alive:
                handle._run()

    def call_soon(  # type: ignore[override]  # any arguments
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]  # any arguments
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._count += 1
        heapq.heappush(self.timers, (when, self._count, timer))
        return timer

    def call_later(  # type: ignore[override]  # any arguments
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        pool = executor or self._default()
        if isinstance(pool, Threads):
            future: asyncio.Future[T] = self.create_future()
            pool.begin(future, lambda: func(*args))
            return future
        return asyncio.wrap_future(pool.submit(func, *args), loop=self)

    def _default(self) -> Threads:
        process = CURRENT.get()
        owner: Any = process or self
        if not hasattr(owner, "default_pool"):
            owner.default_pool = Threads(8, "default")
        pool: Threads = owner.default_pool
        return pool


class Threads(Executor):
    """In place of a ThreadPoolExecutor: each function runs as one callback of the loop, after a random time.

    With one thread they run in the order of the calls.
    """

    def __init__(self, threads: int = 1, thread_name_prefix: str = "", **_: Any) -> None:
        self.threads, self.name = threads, thread_name_prefix
        self.busy_s = BUSY_S.get(thread_name_prefix, (0.0, 0.002))
        self._free = 0.0
        self._waiting: dict[Any, None] = {}
        self._closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        self.begin(future, lambda: fn(*args, **kwargs))
        return future

    def begin(self, future: Any, work: Callable[[], object]) -> None:
        """Run the work later, for a future of either library. One that is cancelled before is never run."""
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        when = loop.now + loop.random.uniform(*self.busy_s)
        if self.threads == 1:
            when = self._free = max(self._free + 1e-7, when)
        self._waiting[future] = None
        loop.call_at(when, self._run, future, work)

    def _run(self, future: Any, work: Callable[[], object]) -> None:
        self._waiting.pop(future, None)
        if future.cancelled():
            return
        try:
            result = work()
        except Killed:
            return
        except BaseException as error:  # noqa: BLE001 - as a thread pool does
            future.set_exception(error)
        else:
            future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        if cancel_futures:
            for future in list(self._waiting):
                future.cancel()


class AtOnce(Executor):
    """In place of a ThreadPoolExecutor inside of other work: each function runs within the call."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as a thread pool does
            future.set_exception(error)
        return future


BUSY_S = {"training": (0.5, 4.0), "compute": (0.01, 0.3), "evaluation": (0.05, 1.0), "building": (0.05, 0.3)}
"""Seconds that the function of a pool takes, by the name of its threads."""


@contextmanager
def virtual_loop(seed: int) -> Iterator[VirtualLoop]:
    """A loop of one life. What is left of it is ended without effects."""
    loop = VirtualLoop(seed)
    asyncio.set_event_loop(None)
    try:
        yield loop
    finally:
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop._ready.clear()
        loop.timers.clear()
        loop.close()
