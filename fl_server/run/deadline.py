"""Time limits of a run: of an attempt, of an evaluation by clients, and of all its rounds together.

Time while the coordinator is down does not count. The time left is written to the ledger every few seconds and when
the coordinator stops. After kill -9 a limit is at most those few seconds longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
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


Attempt = tuple[int, int, int]
"""Round, exchange and number of an attempt."""
_Timed = tuple[int, int, int, Phase]
"""The same with its stage. Each draw of a run with a buffer goes on in all phases, and has COLLECTING here."""


class Deadline:
    """The deadline of the attempt under way; with a buffer, that of each draw. Lives on the event loop."""

    def __init__(self, context: RunContext, control: RunControl) -> None:
        self._context, self._control = context, control
        self._ends: dict[_Timed, float] = {}
        """When the attempts and stages end that it was started for, by the monotonic clock; some may be over."""

    @property
    def started(self) -> bool:
        """Whether the attempt under way has its deadline: it is started after the cohort is stored."""
        return self._attempt_under_way in self._ends

    @property
    def seconds_left(self) -> float:
        """Seconds until the attempt under way is over; 0 at least. With a buffer: until the first draw is."""
        return self._left(min((self._ends.get(attempt, 0.0) for attempt in self._open), default=0.0))

    def seconds_of(self, client: str) -> float:
        """Seconds that a client with work has left."""
        state = self._control.state
        if not state.policy.buffered:
            return self.seconds_left
        work = state.work[client]
        return self._left(self._ends.get((work.version, 0, work.attempt, Phase.COLLECTING), 0.0))

    @staticmethod
    def _left(ends: float) -> float:
        return max(0.0, ends - time.monotonic())

    def start(self, seconds: float, attempt: Attempt | None = None) -> None:
        """Give the attempt under way, or this draw, so long from now."""
        buffered = self._control.state.policy.buffered
        timed = self._attempt_under_way if attempt is None else (*attempt, self._attempt_under_way[3])
        kept = {one: ends for one, ends in self._ends.items() if one in self._open} if buffered else {}
        self._ends = {**kept, timed: time.monotonic() + seconds}
        event = ev.DeadlinePassed(timed[0], timed[2]) if buffered else ev.DeadlinePassed()
        self._control.set_timer(seconds, event, alone=not buffered)

    def resume(self, left: Mapping[Attempt, float | None]) -> None:
        """Start again after a restart. left: the attempts that go on, with the time left as the ledger has it."""
        whole = self._control.config.round.deadline_s
        for attempt, seconds in left.items():
            self.start(time_after_restart(self._context, whole, seconds), attempt)

    async def save(self) -> None:
        """Write the time left."""
        left = {timed[:3]: self._left(self._ends[timed]) for timed in self._open if timed in self._ends}
        if left:
            context = self._context
            with time_left_written(context):
                await context.services.ledger.do(context.store.set_seconds_left, context.run_id, left)

    @property
    def _attempt_under_way(self) -> _Timed:
        state = self._control.state
        phase = Phase.COLLECTING if state.policy.buffered else state.phase
        return state.round, state.exchange, state.attempt, phase

    @property
    def _open(self) -> set[_Timed]:
        """The attempts whose time runs."""
        state = self._control.state
        if state.policy.buffered:
            draws = {(work.version, work.attempt) for work in state.work.values() if not work.late}
            return {(version, 0, attempt, Phase.COLLECTING) for version, attempt in draws}
        return {self._attempt_under_way} if state.phase is Phase.COLLECTING or state.staged else set()


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
