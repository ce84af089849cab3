"""The one thread that touches the model: work waits for its turn, and stops soon after it is cancelled."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from fl_client.training import Interrupted

T = TypeVar("T")


class Worker:
    """Runs functions one after the other, on a thread of its own with the configured number of torch threads."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(1, "training", initializer=torch.set_num_threads, initargs=(threads,))
        self._computing = False
        self._ended = -math.inf

    async def run(self, function: Callable[[Callable[[], None]], T]) -> T:
        """The function's result. It is given a check to call now and then, which raises once this call is cancelled."""
        stop = threading.Event()

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
            return await asyncio.get_running_loop().run_in_executor(self._executor, compute)
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
