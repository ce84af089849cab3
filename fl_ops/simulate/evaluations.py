"""The evaluations of a simulated run: on the server's data, and on clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fl_ops.simulate.clients import has_held_out
from fl_ops.simulate.federation import Federation
from fl_ops.simulate.system.simulated_time import SimulatedTime
from fl_ops.simulate.updates import NotDelivered
from fl_server.rounds import effects
from fl_server.rounds.client_metrics import summary, with_pooled
from fl_server.rounds.sampling import by_id, draw_evaluators
from fl_tasks.summed_metrics import Pool


class Evaluations:
    """The metrics of a run's models."""

    def __init__(self, federation: Federation, members: Sequence[str], time: SimulatedTime | None) -> None:
        """members: all clients; time: who of them is there."""
        self._federation, self._members, self._time = federation, members, time

    def measure(self, announce: effects.Announce, *, awaited: bool) -> Mapping[str, float]:
        """Metrics of the latest model, by name; empty if nothing is due. Raises TaskError.

        awaited: the next round waits for the clients' metrics.
        """
        return {
            **(self._federation.evaluate_on_server() if announce.evaluate else {}),
            **(self._on_clients(awaited=awaited) if announce.ask_clients else {}),
        }

    def _on_clients(self, *, awaited: bool) -> Mapping[str, float]:
        """Metrics over the clients that have held-out data; a client that fails is skipped."""
        config, round_ = self._federation.config, self._federation.snapshot.round
        pool = [client for client in self._members if has_held_out(self._federation.clients, client)]
        present = pool if self._time is None else self._time.eligible(pool)
        drawn: Sequence[str] = draw_evaluators(present, config.evaluation.clients, config.seed, round_)
        if self._time is not None:
            drawn = self._time.evaluate(round_, drawn, awaited=awaited)
        found = dict(self._federation.evaluate(drawn))
        measured = (found[client] for client in by_id(drawn))
        reported = [each for each in measured if not isinstance(each, NotDelivered)]
        sums = Pool()
        for each in reported:
            sums.add(each.sums)
        values, _ = sums.values(self._federation.task)
        means = summary([each.metrics for each in reported], self._federation.directions)
        return with_pooled(means, sums.metrics, values)
