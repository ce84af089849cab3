"""How long the attempt under way may still collect: time that the coordinator is down does not count.

What is left is written into the ledger when the attempt opens, every few seconds while it collects, and when the
coordinator stops. After kill -9 an attempt has at most those few seconds more than it should.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from fl_server import events as ev
from fl_server.round_state import Phase
from fl_server.store.base import StoreError

if TYPE_CHECKING:
    from fl_server.run import Run

log = structlog.get_logger()

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
        """After a restart: what was left, but so long at least that clients can attach again and deliver.

        seconds: as the ledger has it; None from a version that did not write it down, and means the whole time.
        """
        whole = self._run.config.round.deadline_s
        grace = min(whole, self._run.parts.config.limits.reattach_grace_s)
        self.start(whole if seconds is None else max(seconds, grace))

    async def keep(self) -> None:
        """Write down what is left. Where it cannot be written, an older and longer time stands."""
        if self._run.state.phase is not Phase.COLLECTING or self._attempt is None or self._attempt != self._under_way:
            return
        ledger = self._run.parts.ledger
        try:
            await ledger.do(ledger.store.set_seconds_left, self._run.id, self._attempt, self.seconds_left)
        except StoreError as error:
            log.warning("time_left_not_written", run=self._run.id, error=str(error))

    async def keep_up(self) -> None:
        """`keep`, again and again until the run ends."""
        while not self._run.ended:
            await asyncio.sleep(KEEP_EVERY_S)
            await self.keep()

    @property
    def _under_way(self) -> tuple[int, int, int]:
        state = self._run.state
        return state.round, state.exchange, state.attempt
