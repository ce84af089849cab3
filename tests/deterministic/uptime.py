"""Watches deadlines: one passes only after its time, without the time in which the coordinator is down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fl_server.rounds import effects as fx
from fl_server.rounds import events as ev
from fl_server.rounds.machine import advance
from fl_server.rounds.state import RoundState
from tests.deterministic.loop import Process, VirtualLoop
from tests.deterministic.seen import Seen

_ROUNDING_S = 0.01


class Uptime:
    """How long the coordinator of a life has been up, over all of its processes."""

    def __init__(self, loop: VirtualLoop, seen: Seen, deadline_s: float, stage_s: float) -> None:
        """stage_s: of a stage of secure aggregation."""
        self._loop, self._seen, self._deadline_s, self._stage_s = loop, seen, deadline_s, stage_s
        self._before = 0.0
        self._opened: dict[tuple[int, int, int], float] = {}
        """(round, exchange, attempt) -> seconds of being up when it was opened."""
        self._seconds: Callable[[], float] = lambda: self._before

    def begins(self, process: Process) -> None:
        """A process of the coordinator starts."""
        before, started = self._before, self._loop.now
        self._seconds = lambda: before + self._loop.now - started

        def ends() -> None:
            self._before = self._seconds()
            self._seconds = lambda: self._before

        process.on_kill.append(ends)

    def advance(self, state: RoundState, event: ev.Event) -> tuple[RoundState, tuple[Any, ...]]:
        """The core's function of this name."""
        if isinstance(event, ev.DeadlinePassed):
            attempt = (state.round, state.exchange, state.attempt)
            if state.policy.buffered:
                attempt = (event.round, 0, event.attempt)
            used = self._seconds() - self._opened.get(attempt, 0.0)
            gives = self._stage_s if state.staged else self._deadline_s
            if used < gives - _ROUNDING_S:
                self._seen.violations.append(
                    f"a deadline gives its time while up: {used:.3f} of {gives:g} s in round {state.round}"
                )
        after, effects = advance(state, event)
        for effect in effects:
            if isinstance(effect, fx.OpenAttempt | fx.OpenStage):
                self._opened[effect.round, effect.exchange, effect.attempt] = self._seconds()
        return after, effects
