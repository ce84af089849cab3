"""Times that a run has left: for an attempt, for an evaluation by clients, for all its rounds together.

Time that the coordinator is down does not count. What is left is written into the ledger every few seconds and when the
coordinator stops; after kill -9 there are at most those few seconds more than there should be.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

import structlog

from fl_server import events as ev
from fl_server.round_state import Phase
from fl_server.store.base import StoreError

if TYPE_CHECKING:
    from fl_server.run import Run

log = structlog.get_logger()
P = ParamSpec("P")

KEEP_EVERY_S = 5.0
"""Between two writes of the time left."""


class Deadline:
    """A run's timer for its attempts. Lives on the event loop."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ends = 0.0
        self._attempt: tuple[int, int, int] | None = None
        """What it was started for, which may already be over."""

    @property
    def seconds_left(self) -> float:
        """Until the attempt under way is over; 0 at least."""
        return max(0.0, self._ends - time.monotonic())

    def start(self, seconds: float) -> None:
        """The attempt under way has so long from now."""
        self._attempt = self._under_way
        self._ends = time.monotonic() + seconds
        self._run.set_timer(seconds, ev.DeadlinePassed())

    def take_up(self, seconds: float | None) -> None:
        """After a restart; seconds: as the ledger has it."""
        self.start(after_restart(self._run, self._run.config.round.deadline_s, seconds))

    async def keep(self) -> None:
        """Write down what is left. Where it cannot be written, an older and longer time stands."""
        if self._run.state.phase is not Phase.COLLECTING or self._attempt is None or self._attempt != self._under_way:
            return
        store = self._run.parts.ledger.store
        await keep(self._run, store.set_seconds_left, self._run.id, self._attempt, self.seconds_left)

    @property
    def _under_way(self) -> tuple[int, int, int]:
        state = self._run.state
        return state.round, state.exchange, state.attempt


def after_restart(run: Run, whole: float, left: float | None) -> float:
    """Seconds that a restart gives: what was left, but so long at least that clients can attach again and deliver.

    left: as the ledger has it; None from a version that did not write it down, and means the whole time.
    """
    grace = min(whole, run.parts.config.limits.reattach_grace_s)
    return whole if left is None else max(left, grace)


async def keep(run: Run, write: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Write a time down, for once; without room an older one stands."""
    try:
        await run.parts.ledger.do(write, *args, **kwargs)
    except StoreError as error:
        log.warning("time_left_not_written", run=run.id, error=str(error))


async def keep_all(run: Run) -> None:
    """Write down all times that stand still while the coordinator is down."""
    await run.deadline.keep()
    await run.client_evaluations.keep()
    if run.config.stop.wall_time_s and not run.ended:
        await keep(run, run.parts.ledger.store.update_run, run.record)


async def keep_up(run: Run) -> None:
    """`keep_all`, again and again until the run ends."""
    while not run.ended:
        await asyncio.sleep(KEEP_EVERY_S)
        await keep_all(run)
