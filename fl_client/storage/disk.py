"""The one thread that uses the disk, and the limits of what client states may take on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from fl_client.errors import WorkFailed
from protos.fl.v1 import coordinator_pb2 as pb

P = ParamSpec("P")
T = TypeVar("T")


class DiskThread:
    """Runs functions one after the other, in the order of the calls, so that the event loop never waits for a disk."""

    def __init__(self, threads: Callable[[int, str], Executor] = ThreadPoolExecutor) -> None:
        """threads: makes a pool of so many threads with that name."""
        self._executor = threads(1, "disk")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))

    async def close(self) -> None:
        """Accept no more calls, and wait until all earlier ones are done."""
        await asyncio.to_thread(self._executor.shutdown)


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """Limits of the client states and of the updates that have a next client state.

    Files of a run with an open outcome are promised to its coordinator, so none of them is removed for another run:
    work that needs more is refused. A coordinator reports ended runs at the next registration.
    """

    runs: int
    """Runs with files."""
    max_bytes: int
    """Of all runs together."""
    updates: int = 8
    """Updates of one run. Beyond it the oldest are removed."""

    def check_runs(self, runs: int) -> None:
        """Raises WorkFailed for too many runs."""
        if runs > self.runs:
            raise _over_limit(f"client states of at most {self.runs} runs (limits.max_runs)", f"{runs}")

    def check_bytes(self, size: int) -> None:
        """Raises WorkFailed for too many bytes."""
        if size > self.max_bytes:
            raise _over_limit(f"at most {self.max_bytes} bytes of client states (limits.max_kept_bytes)", f"{size}")


DEFAULT_LIMITS = StorageLimits(16, 16 << 30)
"""As in LimitsConfig."""


def _over_limit(allowed: str, needed: str) -> WorkFailed:
    return WorkFailed(
        pb.FAILURE_REASON_RESOURCES,
        f"this device's owner allows {allowed}, got {needed}: end runs that are over, or raise the limit there",
    )
