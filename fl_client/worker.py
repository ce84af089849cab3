"""The one thread that touches the model: work waits for its turn, and stops soon after it is cancelled."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import torch

from fl_client.training import Interrupted

T = TypeVar("T")


class Worker:
    """Runs functions one after the other, on a thread of its own with the configured number of torch threads."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(1, "training", initializer=torch.set_num_threads, initargs=(threads,))
        self._turn = asyncio.Lock()
        """Held until the thread has really ended what it was given last, not only until nobody wants it any more."""
        self._computing = False
        self._ended = -math.inf

    async def run(self, function: Callable[[Callable[[], None]], T], seconds: float | None = None) -> T:
        """The function's result. It is given a check to call now and then, which raises once this call is cancelled.

        seconds: as long as it may compute. Who waits for the thread leaves nothing behind when it is cancelled.

        Raises:
            TimeoutError: the function was still computing after `seconds`.
        """
        await self._turn.acquire()
        stop, loop = threading.Event(), asyncio.get_running_loop()

        def over(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._turn.release)

        def check() -> None:
            if stop.is_set():
                raise Interrupted

        def compute() -> T:
            self._computing = True
            try:
                return function(check)
            finally:
                self._computing, self._ended = False, time.monotonic()

        try:
            future = self._executor.submit(compute)
        except BaseException:
            self._turn.release()
            raise
        future.add_done_callback(over)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(future)
        finally:
            stop.set()

    def idle_for(self) -> float:
        """Seconds since the thread last computed: 0 while it does, infinite before it ever did. For any thread."""
        return 0.0 if self._computing else time.monotonic() - self._ended

    async def idle(self, seconds: float) -> bool:
        """Take no more work and wait until the thread is free; False if it is not within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self.run(lambda check: None)
        except TimeoutError:
            return False
        finally:
            self._executor.shutdown(wait=False, cancel_futures=True)
        return True
