"""The updates of a cohort in the order of arrival, and the evaluations of a simulated run."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cache

from fl_ops.simulate.clients import has_held_out
from fl_ops.simulate.engines.client_work import one_thread
from fl_ops.simulate.engines.engine import ExamplesOf
from fl_ops.simulate.federation import Federation
from fl_ops.simulate.measures.section import MeasureSection
from fl_ops.simulate.measures.sharpness import SampledLoss, sharpness
from fl_ops.simulate.system.simulated_time import SimulatedTime
from fl_ops.simulate.updates import Contribution, NotDelivered
from fl_server.rounds import effects
from fl_server.rounds.metrics import as_training, summary, with_pooled
from fl_server.rounds.sampling import by_id, draw_evaluators, tickets
from fl_server.rounds.state import RoundState
from fl_server.run.assignments import RoundPosition
from fl_tasks.summed_metrics import Pool

Result = Contribution | NotDelivered


class Collection:
    """The results of the current attempt's clients. Which clients work ahead changes no result."""

    def __init__(self, federation: Federation, time: SimulatedTime | None) -> None:
        """time: decides the order of arrival; None: it is random, so that over-selection favours no client."""
        self._federation, self._time = federation, time
        self._place: RoundPosition | None = None
        self._working: Iterator[list[Result]] = iter(())
        self._results: dict[str, Result] = {}
        self._tickets: tuple[int, Callable[[str], int]] = (-1, len)

    def next_client(self, state: RoundState) -> str:
        """The outstanding client that arrives next, without simulated time."""
        return min(state.outstanding, key=self._arrival(state.round))

    def following(self, state: RoundState) -> list[Contribution]:
        """The updates that are there and arrive directly after that of `next_client`; no more than the goal lacks."""
        most = min(len(self._results), state.goal - len(state.admitted) - 1)
        following: list[Contribution] = []
        for client in heapq.nsmallest(1 + most, state.outstanding, self._arrival(state.round))[1:] if most > 0 else ():
            if not isinstance(update := self._results.get(client), Contribution):
                break
            following.append(update)
        for update in following:
            del self._results[update.client]
        return following

    def _arrival(self, round_: int) -> Callable[[str], int]:
        """The random order of a round."""
        if round_ != self._tickets[0]:
            self._tickets = (round_, cache(tickets("arrival", self._federation.config.seed, round_)))
        return self._tickets[1]

    def result(self, state: RoundState, client: str) -> Result:
        """The result of an outstanding client. If it has not begun, all clients that are needed begin now."""
        place = RoundPosition(state.round, state.exchange, state.attempt, self._federation.config.round.deadline_s)
        if place != self._place:
            self.discard()
            self._place = place
        while client not in self._results:
            if (together := next(self._working, None)) is None:
                needed = [other for other in self._needed(state, client) if other not in self._results]
                self._working = self._federation.work_together(place, needed)
            else:
                self._results |= {one.client: one for one in together}
        return self._results.pop(client)

    def discard(self) -> None:
        """Stop the work in progress and forget its results."""
        if isinstance(self._working, Generator):
            self._working.close()
        self._working, self._results, self._place = iter(()), {}, None

    def _needed(self, state: RoundState, first: str) -> list[str]:
        """The outstanding clients whose updates close the exchange, if none of them fails. first: arrives first."""
        missing = state.working if state.policy.close == "cohort" else max(1, state.goal - len(state.admitted))
        if self._time is not None:
            return [first, *self._time.deliveries(missing - 1)]
        return sorted(state.outstanding, key=self._arrival(state.round))[:missing]


class Evaluations:
    """The metrics of a run's models."""

    def __init__(
        self,
        federation: Federation,
        members: Sequence[str],
        time: SimulatedTime | None,
        section: MeasureSection | None,
    ) -> None:
        """members: all clients; time: who of them is there; section: what is measured beyond evaluations."""
        self._federation, self._members, self._time = federation, members, time
        self._section = section
        self._loss: SampledLoss | None = None

    def measure(self, announce: effects.Announce, *, awaited: bool) -> Mapping[str, float]:
        """Metrics of the latest model, by name; empty if nothing is due. Raises TaskError.

        awaited: the next round waits for the clients' metrics.
        """
        return {
            **(self._federation.evaluate_on_server() if announce.evaluate else {}),
            **(self._on_clients(awaited=awaited) if announce.ask_clients else {}),
        }

    def measured(self) -> Mapping[str, float]:
        """What the run measures of the latest model beyond its evaluations; see `measures`. Raises TaskError."""
        section, federation = self._section, self._federation
        if section is None:
            return {}
        of_clients = as_training(self._summary(self._members, "training")) if section.training else {}
        if section.sharpness is None:
            return of_clients
        with federation.profile.part("evaluation"), one_thread():
            if self._loss is None:
                device = federation.engine.snapshots.device
                self._loss = SampledLoss(section.sharpness, federation.task, federation.clients, device)
            return {**of_clients, **sharpness(section.sharpness, self._loss, federation.model())}

    def _on_clients(self, *, awaited: bool) -> Mapping[str, float]:
        """Metrics over the clients that have held-out data; a client that fails is skipped."""
        config, round_ = self._federation.config, self._federation.snapshot.round
        pool = [client for client in self._members if has_held_out(self._federation.clients, client)]
        present = pool if self._time is None else self._time.eligible(pool)
        drawn: Sequence[str] = draw_evaluators(present, config.evaluation.clients, config.seed, round_)
        if self._time is not None:
            drawn = self._time.evaluate(round_, drawn, awaited=awaited)
        return self._summary(drawn, "held_out")

    def _summary(self, drawn: Sequence[str], on: ExamplesOf) -> dict[str, float]:
        found = dict(self._federation.evaluate(drawn, on))
        measured = (found[client] for client in by_id(drawn))
        reported = [one for one in measured if not isinstance(one, NotDelivered)]
        sums = Pool()
        for measurement in reported:
            sums.add(measurement.sums)
        values, _ = sums.values(self._federation.task)
        means = summary([measurement.metrics for measurement in reported], self._federation.directions)
        return with_pooled(means, sums.metrics, values)
