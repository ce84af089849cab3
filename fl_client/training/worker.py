"""The one thread that uses the model. Calls wait for their turn, and end soon after a cancellation."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import torch

from algorithms.outside_code import place_of_thread
from fl_client.training.results import Interrupted, failure_of

T = TypeVar("T")


class Worker:
    """Runs functions one after the other, on its own thread with the configured number of torch threads."""

    def __init__(self, threads: int, pool: Callable[..., Executor] = ThreadPoolExecutor) -> None:
        """threads: of torch. pool: makes the thread."""
        self._executor = pool(1, "training", initializer=torch.set_num_threads, initargs=(threads,))
        self._turn = asyncio.Lock()
        """Held until the thread has ended its last function, not only until the caller is cancelled."""
        self._computing = False
        self._ended = -math.inf
        self._abandoned = math.inf
        """When the caller of the function in progress left, by the monotonic clock; infinite while it waits."""
        self._thread = 0

    async def run(self, function: Callable[[Callable[[], None]], T], seconds: float | None = None) -> T:
        """The function's result. The function gets a check to call often, which raises once this call is cancelled.

        seconds: time limit of the computing. A call that is cancelled before its turn has no effect.

        Raises:
            TimeoutError: the function was still computing after `seconds`.
        """
        await self._turn.acquire()
        stop, loop = threading.Event(), asyncio.get_running_loop()

        def release(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed: no call waits
                loop.call_soon_threadsafe(self._turn.release)

        def check() -> None:
            if stop.is_set():
                raise Interrupted

        def compute() -> T:
            self._thread, self._abandoned = threading.get_ident(), math.inf
            self._computing = True
            try:
                return function(check)
            except BaseException as error:
                if isinstance(error, Exception):
                    raise
                # It would end the event loop: SystemExit or CancelledError of the task's own code.
                raise failure_of(error) from error
            finally:
                self._computing, self._ended = False, time.monotonic()

        try:
            future = self._executor.submit(compute)
        except BaseException:
            self._turn.release()
            raise
        future.add_done_callback(release)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(future)
        finally:
            stop.set()
            if not future.done():
                self._abandoned = time.monotonic()

    def idle_for(self) -> float:
        """Seconds since the thread last computed: 0 while it does, infinite before the first time. Thread-safe."""
        return 0.0 if self._computing else time.monotonic() - self._ended

    def hangs_for(self) -> float:
        """Seconds that the function in progress goes on although its caller has left; 0 if there is none such."""
        return max(0.0, time.monotonic() - self._abandoned) if self._computing else 0.0

    @property
    def place(self) -> str:
        """What the thread does now, as in "mine.py, line 3, in loss"; empty if that is not code of the task."""
        return place_of_thread(self._thread)

    async def shut_down(self, seconds: float) -> bool:
        """Accept no more calls, and wait until the thread is free. Returns False if it is not within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self.run(lambda check: None)
        except TimeoutError:
            return False
        finally:
            self._executor.shutdown(wait=False, cancel_futures=True)
        return True
