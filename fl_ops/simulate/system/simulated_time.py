"""The clock as the rounds of a run see it: commands of the round state machine in, its events out."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from algorithms import ClientContext
from fl_ops.simulate.federation import Federation
from fl_ops.simulate.system.clock import Amount, Clock, Course
from fl_ops.simulate.system.devices import Devices
from fl_ops.simulate.traffic import Names
from fl_server.aggregation.methods import local_in
from fl_server.rounds import effects
from fl_server.rounds import events as ev
from fl_server.rounds.state import RoundState


class Workload:
    """The amounts of work of a run's clients."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._sizes: dict[str, tuple[int, int, int]] = {}
        self._per_step = 2 if _anchored(federation) else 1

    def training(self, exchange: int, client: str) -> Amount:
        """The work of an exchange, at the model that the federation has prepared for it."""
        federation, (examples, own_batches, _) = self._federation, self._size_of(client)
        algorithm = federation.engine.algorithm
        asked = algorithm.exchanges[exchange]
        gradients = examples if asked.passes else 0
        if asked.trains:
            gradients += self._trained(examples, own_batches) * self._per_step
        if algorithm.gradient.rho > 0:  # SAM takes one gradient for its ascent, and one there
            gradients *= 2
        down = federation.traffic.missing(client, federation.bundles.names)
        return Amount(down, gradients, federation.engine.shapes[exchange].size_bytes)

    def evaluation(self, client: str) -> Amount:
        """The evaluation of the latest model; metrics are no tensor bytes. An example counts like a gradient."""
        federation = self._federation
        return Amount(federation.traffic.missing(client, federation.bundles.of_evaluation), self._size_of(client)[2], 0)

    def _trained(self, examples: int, own_batches: int) -> int:
        """Number of examples in the batches of all local steps."""
        federation = self._federation
        local = local_in(federation.config, federation.engine.algorithm, federation.snapshot.round + 1)
        if local.steps is None:
            return examples * (local.epochs or 1)
        if own_batches:
            return -(-local.steps * examples // own_batches)
        epochs, steps = divmod(local.steps, -(-examples // local.batch_size))
        return epochs * examples + min(steps * local.batch_size, examples)

    def _size_of(self, client: str) -> tuple[int, int, int]:
        """A client's training examples, its own batches of an epoch, and its held-out examples."""
        if client not in self._sizes:
            local = self._federation.clients[client]
            self._sizes[client] = len(local.train), local.train.own_batches, len(local.held_out)
        return self._sizes[client]


def _anchored(federation: Federation) -> bool:
    """Whether each step takes a gradient at y and one at x, as in Mime."""
    algorithm, like = federation.engine.algorithm, federation.snapshot.state.x
    context = ClientContext(like, dict.fromkeys(algorithm.client_init(like), like))
    return algorithm.client_rule(context).anchored


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
        self._config = federation.config
        self._each_draw = self._config.round.close == "buffer"
        self.clock = Clock(devices, each_draw=self._each_draw)
        self._workload = Workload(federation)
        self._assigned: dict[str, Names] = {}
        self._waits = 0

    def eligible(self, clients: Iterable[str]) -> tuple[str, ...]:
        """Those of the clients that are there."""
        return self._devices.present(clients, self.clock.now)

    def carry_out(self, command: effects.Effect) -> None:
        """The clients that a command is for begin or stop their work."""
        match command:
            case effects.OpenAttempt():
                self.open(command)
            case effects.Cancel():
                self.cancel(command.clients)

    def open(self, attempt: effects.OpenAttempt) -> None:
        """The cohort of an attempt begins its work, and the deadline starts."""
        self._waits = 0
        self._assigned |= dict.fromkeys(attempt.cohort, self._federation.bundles.names)
        self.clock.assign(
            attempt.cohort,
            lambda client: self._workload.training(attempt.exchange, client),
            (attempt.round, attempt.exchange, attempt.attempt),
            self._config.round.deadline_s,
        )

    def deliveries(self, most: int) -> list[str]:
        """The clients that deliver next before the deadline, in this order: `most` at most."""
        return [one.client for one in self.clock.deliveries(most)]

    def go_on(self) -> str | ev.ClientDroppedOut | ev.DeadlinePassed | ev.TimeUsed | None:
        """Go to what happens next: a client delivers, or another event. None: nobody works, with a buffer only."""
        happening = self.clock.upcoming()
        if happening is None:
            return None
        limit = self._config.stop.wall_time_s
        if limit and happening.at > limit:
            self.clock.wait_until(limit)
            return ev.TimeUsed(self.clock.now)
        self.clock.take(happening)
        if happening.course is None:
            return ev.DeadlinePassed(happening.names[0], happening.names[2]) if self._each_draw else ev.DeadlinePassed()
        client = happening.course.client
        if happening.course.delivers:
            return client
        self._interrupted(happening.course)
        return ev.ClientDroppedOut(client)

    def cancel(self, clients: Iterable[str]) -> None:
        """These clients stop their work."""
        for course in self.clock.cancel(clients):
            self._interrupted(course)

    def commit(self) -> None:
        """The server's own work of a round is done."""
        self.clock.wait_until(self.clock.now + self._devices.section.server_s)

    def evaluate(self, round_: int, drawn: Sequence[str], *, awaited: bool) -> list[str]:
        """Clients begin to evaluate. Returns those of them that deliver metrics.

        awaited: whether the next round waits for the metrics; the time goes on to the last of them then.
        """
        courses, until = self.clock.evaluate(
            drawn, self._workload.evaluation, (round_,), self._config.evaluation.clients_deadline_s
        )
        for course in courses:
            if not course.delivers:
                self._assigned[course.client] = self._federation.bundles.of_evaluation
                self._interrupted(course, until)
        if awaited:
            self.clock.wait_until(until)
        return [course.client for course in courses if course.delivers]

    def wait(self, state: RoundState, usable: Collection[str]) -> ev.Event | None:
        """Wait until a run that has too few clients can draw again. None: it never can.

        usable: the clients that may be drawn in this round if they are there.
        """
        self._waits += 1
        present = self.eligible(usable)
        if state.goal and not state.out.isdisjoint(present):
            self.clock.wait_until(self.clock.now + effects.RETRY_S)
            return ev.RetryDue()
        comes = self._devices.next_arrival(usable, self.clock.now)
        if comes is None or self._waits > MOST_WAITS:
            return None
        self.clock.wait_until(comes)
        return ev.RosterChanged(self.eligible(usable), settled=True)

    def _interrupted(self, course: Course, until: float = math.inf) -> None:
        """Count the bytes that were transferred for nothing, and what the client holds of them."""
        down, up = course.transferred(min(self.clock.now, until))
        self._federation.traffic.interrupted(course.client, self._assigned[course.client], down, up)
