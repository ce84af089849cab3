"""The clock as the rounds of a run see it: commands of the round state machine in, its events out."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from fl_ops.simulate.federation import Federation
from fl_ops.simulate.system.clock import Clock, ClockPoint
from fl_ops.simulate.system.courses import Course
from fl_ops.simulate.system.devices import Devices
from fl_ops.simulate.system.workload import Workload
from fl_ops.simulate.traffic import Names
from fl_server.rounds import effects
from fl_server.rounds import events as ev
from fl_server.rounds.state import RoundState

MOST_WAITS = 10_000
"""Clients that come back, one after the other, before a run that cannot draw a cohort is given up."""


class SimulatedTime:
    """Decides when the clients of a run deliver, by their devices.

    Args:
        devices: of all clients.
        federation: the run; its counter of bytes gets the transfers that come to nothing.
    """

    def __init__(self, devices: Devices, federation: Federation) -> None:
        self._devices, self._federation = devices, federation
        self._clock = Clock(devices)
        self._config = federation.config
        self._workload = Workload(federation)
        self._assigned: dict[str, Names] = {}
        self._waits = 0

    @property
    def now(self) -> float:
        """Simulated seconds since the start of the run."""
        return self._clock.now

    @property
    def point(self) -> ClockPoint:
        """The time after a round."""
        return self._clock.point

    def continue_from(self, point: ClockPoint) -> None:
        """Go on from the time after a round."""
        self._clock.continue_from(point)

    def eligible(self, clients: Iterable[str]) -> tuple[str, ...]:
        """Those of the clients that are there."""
        return self._devices.present(clients, self.now)

    def open(self, attempt: effects.OpenAttempt) -> None:
        """The cohort of an attempt begins its work, and the deadline starts."""
        self._waits = 0
        self._assigned |= dict.fromkeys(attempt.cohort, self._federation.bundles)
        self._clock.assign(
            attempt.cohort,
            lambda client: self._workload.training(attempt.exchange, client),
            (attempt.round, attempt.exchange, attempt.attempt),
            self._config.round.deadline_s,
        )

    def deliveries(self, most: int) -> list[str]:
        """The clients that deliver next before the deadline, in this order: `most` at most."""
        return [one.client for one in self._clock.deliveries(most)]

    def go_on(self) -> str | ev.ClientDroppedOut | ev.DeadlinePassed | None:
        """Go to what happens next: a client delivers, or another event. None: the run's time is over before it."""
        happening = self._clock.upcoming()
        limit = self._config.stop.wall_time_s
        if limit and happening.at > limit:
            self._clock.wait_until(limit)
            return None
        self._clock.take(happening)
        if happening.course is None:
            return ev.DeadlinePassed()
        client = happening.course.client
        if happening.course.delivers:
            return client
        self._interrupted(happening.course)
        return ev.ClientDroppedOut(client)

    def cancel(self, clients: Iterable[str]) -> None:
        """These clients stop their work."""
        for course in self._clock.cancel(clients):
            self._interrupted(course)

    def commit(self) -> None:
        """The server's own work of a round is done."""
        self._clock.wait_until(self.now + self._devices.section.server_s)

    def evaluate(self, round_: int, drawn: Sequence[str], *, awaited: bool) -> list[str]:
        """Clients begin to evaluate. Returns those of them that deliver metrics.

        awaited: whether the next round waits for the metrics; the time goes on to the last of them then.
        """
        courses, until = self._clock.evaluate(
            drawn, self._workload.evaluation, (round_,), self._config.evaluation.clients_deadline_s
        )
        for course in courses:
            if not course.delivers:
                self._assigned[course.client] = self._federation.evaluation_bundles
                self._interrupted(course, until)
        if awaited:
            self._clock.wait_until(until)
        return [course.client for course in courses if course.delivers]

    def wait(self, state: RoundState, usable: Collection[str]) -> ev.Event | None:
        """Wait until a run that has too few clients can draw again. None: it never can.

        usable: the clients that may be drawn in this round if they are there.
        """
        self._waits += 1
        present = self.eligible(usable)
        if state.goal and not state.out.isdisjoint(present):
            self._clock.wait_until(self.now + effects.RETRY_S)
            return ev.RetryDue()
        comes = self._devices.next_arrival(usable, self.now)
        if comes is None or self._waits > MOST_WAITS:
            return None
        self._clock.wait_until(comes)
        return ev.RosterChanged(self.eligible(usable), settled=True)

    def _interrupted(self, course: Course, until: float = math.inf) -> None:
        """Count the bytes that were transferred for nothing, and what the client holds of them."""
        down, up = course.transferred(min(self.now, until))
        self._federation.traffic.interrupted(course.client, self._assigned[course.client], down, up)
