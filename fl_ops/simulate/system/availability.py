"""When one client's device is available: intervals of simulated time, asked for in the order of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from fl_ops.simulate.system.draws import draw_exponential, draw_share
from fl_ops.simulate.system.section import DutyCycle
from fl_ops.simulate.system.traces import Interval


class Availability:
    """The intervals of one client, of which it keeps the current or the next one only.

    Every question is about a time that is not before that of the question before.
    """

    __slots__ = ("_begin", "_end", "_intervals")

    def __init__(self, intervals: Iterable[Interval]) -> None:
        """intervals: [begin, end) in seconds since the start of the run, in order and apart; may be endless."""
        self._intervals = iter(intervals)
        self._begin, self._end = next(self._intervals, _NEVER)

    def leaves(self, now: float) -> float | None:
        """The end of the interval that contains `now`; None if the client is away."""
        self._go_to(now)
        return self._end if self._begin <= now else None

    def comes(self, now: float) -> float:
        """`now` if the client is there, else the begin of its next interval; infinity if there is none."""
        self._go_to(now)
        return max(self._begin, now)

    def _go_to(self, now: float) -> None:
        while self._end <= now:
            self._begin, self._end = next(self._intervals, _NEVER)


_NEVER: Interval = (math.inf, math.inf)
ALWAYS: Interval = (0.0, math.inf)


def duty_cycle(cycle: DutyCycle, seed: int, client: str) -> Iterator[Interval]:
    """Exponential times on and off, without end.

    At time 0 the client is on with the probability on_s / (on_s + off_s). The rest of an exponential time has the same
    distribution as all of it, so the first time on or off is drawn as the others are.
    """
    there = draw_share("system-first", seed, client) < cycle.on_s / (cycle.on_s + cycle.off_s)
    now = 0.0
    for number in count():
        if number or not there:
            now += draw_exponential(cycle.off_s, draw_share("system-off", seed, client, number))
        end = now + draw_exponential(cycle.on_s, draw_share("system-on", seed, client, number))
        yield now, end
        now = end


def repeated(intervals: Sequence[Interval], period: float | None) -> Iterator[Interval]:
    """The intervals, and the same again after every `period` seconds; None: once.

    An interval to the end of a period and one from the begin of the next are one.
    """
    if period is None:
        yield from intervals
    elif math.isclose(intervals[0][1] - intervals[0][0], period):
        yield ALWAYS
    else:
        pending: Interval | None = None
        for shift in count():
            for begin, end in intervals:
                begin, end = begin + shift * period, end + shift * period  # noqa: PLW2901 - of this period
                if pending is not None and math.isclose(begin, pending[1]):
                    pending = pending[0], end
                    continue
                if pending is not None:
                    yield pending
                pending = begin, end
