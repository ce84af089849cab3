"""The one thread that touches the files of the state directory, so that the event loop never waits for a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Disk:
    """Runs functions one after the other, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "disk")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))

    async def idle(self) -> None:
        """Take no more work and wait until all that was asked for is done."""
        await asyncio.to_thread(self._executor.shutdown)
