"""Repeats what failed because the state directory had vanished, and steps back while the directory cannot be used.

A device that steps back reports to the coordinator that it may not train, with the reason, and is not drawn. It tests
the directory again and again, and reports that it may train as soon as the directory can be used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import structlog

from fl_client.errors import beyond_limits
from fl_client.gates.availability import AvailabilityMonitor
from fl_client.storage.disk import DiskThread
from fl_client.storage.state import StateDir, examine

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")


class StateDirectory:
    """The state directory of a running daemon. Lives on the event loop; all files are used on the disk's thread."""

    def __init__(self, state: StateDir, disk: DiskThread, availability: AvailabilityMonitor, check_s: float) -> None:
        """check_s: seconds between two examinations."""
        self._state, self._disk, self._availability = state, disk, availability
        self._check_s = check_s
        self._problem: str | None = None
        self._need_bytes = 0
        """Free bytes without which the last write failed."""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result on the disk's thread. A call that fails because the directory vanished is repeated.

        Raises OSError.
        """
        try:
            return await self._disk.run(function, *args, **kwargs)
        except OSError:
            if not await self._examine():
                raise
            return await self._disk.run(function, *args, **kwargs)

    async def required(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do what `run` does, for what an assignment needs. Raises WorkFailed, and steps back where that helps."""
        try:
            return await self.run(function, *args, **kwargs)
        except OSError as error:
            await self.step_back()
            raise beyond_limits(f"state_dir: expected a directory that can be written, got {error}") from error

    async def step_back(self, need_bytes: int = 0) -> None:
        """Work has failed because of the directory: take no new work until this many bytes can be written."""
        self._need_bytes = max(self._need_bytes, need_bytes)
        await self._examine(write=True)

    async def watch(self) -> None:
        """Examine the directory until cancelled."""
        while True:
            await asyncio.sleep(self._check_s)
            try:
                await self._examine(write=self._problem is not None)
            except Exception:  # a fault of the daemon must not end it: it trains with the directory as it is
                log.exception("state_dir_check_broken")

    async def _examine(self, *, write: bool = False) -> bool:
        """Returns whether something had vanished and was made again."""
        made_again, problem = await self._disk.run(examine, self._state, self._need_bytes if write else None)
        if made_again:
            log.warning(
                "state_dir_made_again", path=str(self._state.path),
                lost="saved updates and client states that were in it; do not delete it while the daemon runs",
            )  # fmt: skip
        if problem is not None or self._problem is None or write:
            self._set(problem)
        return made_again

    def _set(self, problem: str | None) -> None:
        before, self._problem = self._problem, problem
        if problem is None:
            self._need_bytes = 0
        if (before is None) == (problem is None):
            return
        self._availability.set_state_dir(problem)
        if problem is None:
            log.info("state_dir_usable", path=str(self._state.path))
            return
        log.error(
            "state_dir_unusable", path=str(self._state.path), reason=problem,
            todo="free space, or mount and own the directory so that this daemon can write; it takes no work until"
            " then, and continues without a restart",
        )  # fmt: skip
