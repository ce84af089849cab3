"""Time limits of a run: of an attempt, of an evaluation by clients, and of all its rounds together.

Time while the coordinator is down does not count. The time left is written to the ledger every few seconds and when
the coordinator stops. After kill -9 a limit is at most those few seconds longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from fl_server.rounds import events as ev
from fl_server.rounds.state import Phase
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.store.errors import StoreError

log = structlog.get_logger()

SAVE_EVERY_S = 5.0
"""Between two writes of the time left."""


class Deadline:
    """The deadline of the attempt under way. Lives on the event loop."""

    def __init__(self, context: RunContext, control: RunControl) -> None:
        self._context, self._control = context, control
        self._ends = 0.0
        self._attempt: tuple[int, int, int, Phase] | None = None
        """The attempt and the stage that it was started for; they may be over."""

    @property
    def started(self) -> bool:
        """Whether the attempt under way has its deadline: it is started after the cohort is stored."""
        return self._attempt == self._attempt_under_way

    @property
    def seconds_left(self) -> float:
        """Seconds until the attempt under way is over; 0 at least."""
        return max(0.0, self._ends - time.monotonic())

    def start(self, seconds: float) -> None:
        """Give the attempt under way so long from now."""
        self._attempt = self._attempt_under_way
        self._ends = time.monotonic() + seconds
        self._control.set_timer(seconds, ev.DeadlinePassed())

    def resume(self, seconds: float | None) -> None:
        """Start again after a restart. seconds: the time left as the ledger has it."""
        self.start(time_after_restart(self._context, self._control.config.round.deadline_s, seconds))

    async def save(self) -> None:
        """Write the time left."""
        state = self._control.state
        if not (state.phase is Phase.COLLECTING or state.staged) or self._attempt is None:
            return
        if self.started:
            context = self._context
            with time_left_written(context):
                method = context.store.set_seconds_left
                await context.services.ledger.do(method, context.run_id, self._attempt[:3], self.seconds_left)

    @property
    def _attempt_under_way(self) -> tuple[int, int, int, Phase]:
        state = self._control.state
        return state.round, state.exchange, state.attempt, state.phase


def whole_time(control: RunControl) -> float:
    """Seconds that the attempt under way has, or its stage of secure aggregation."""
    state = control.state
    return state.policy.stage_s if state.staged else control.config.round.deadline_s


def time_after_restart(context: RunContext, whole: float, left: float | None) -> float:
    """Seconds left after a restart: at least so many that clients can attach again and deliver.

    left: as the ledger has it; None before the first write, which gives the whole time.
    """
    grace = min(whole, context.services.config.limits.reattach_grace_s)
    return whole if left is None else max(left, grace)


@contextmanager
def time_left_written(context: RunContext) -> Iterator[None]:
    """A time left is written, without retries. If that fails, the older and longer time in the ledger stays."""
    try:
        yield
    except StoreError as error:
        log.warning("time_left_not_written", run=context.run_id, error=str(error))


async def count_wall_time(control: RunControl) -> None:
    """Report the time that a run with a limit has used, without that of pauses."""
    began = time.monotonic()
    while control.state.wall_time_s and not control.ended:
        await asyncio.sleep(min(1.0, max(0.01, control.state.wall_time_s - control.state.elapsed_s)))
        async with control.turn:
            now = time.monotonic()
            used = 0.0 if control.state.paused else now - began
            began, event = now, ev.TimeUsed(control.state.elapsed_s + used)
            if control.applies(event):
                await control.take(event)
