"""The evaluations of a simulated run: on the server's data, on clients, and the stop rules that read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fl_ops.simulate.clients import has_held_out
from fl_ops.simulate.federation import Federation
from fl_ops.simulate.reports import RoundResult
from fl_ops.simulate.system.simulated_time import SimulatedTime
from fl_ops.simulate.updates import NotDelivered
from fl_server.rounds import effects
from fl_server.rounds.client_metrics import has_evaluation, summary, with_pooled
from fl_server.rounds.sampling import by_id, draw_evaluators
from fl_server.rounds.stop_rules import Evaluation, stop_reason
from fl_tasks.summed_metrics import Pool


class Evaluations:
    """The metrics of a run's models."""

    def __init__(self, federation: Federation, members: Sequence[str], time: SimulatedTime | None) -> None:
        """members: all clients; time: who of them is there."""
        self._federation, self._members, self._time = federation, members, time
        self._done: list[Evaluation] = []

    def continue_from(self, earlier: Iterable[RoundResult]) -> None:
        """Count the evaluations of an earlier process."""
        for each in earlier:
            self._add(each.round, each.metrics)

    def measure(self, announce: effects.Announce, *, awaited: bool) -> Mapping[str, float]:
        """Metrics of the latest model, by name; empty if nothing is due. Raises TaskError.

        awaited: the next round waits for the clients' metrics.
        """
        metrics = {
            **(self._federation.evaluate_on_server() if announce.evaluate else {}),
            **(self._on_clients(awaited=awaited) if announce.ask_clients else {}),
        }
        self._add(self._federation.snapshot.round, metrics)
        return metrics

    def stop_reason(self) -> str | None:
        """Why the run ends now by its metric. None: it goes on."""
        return stop_reason(self._federation.config.stop.policy, self._done)

    def _add(self, round_: int, metrics: Mapping[str, float]) -> None:
        if has_evaluation(metrics, self._federation.config.stop.metric):
            self._done.append((round_, metrics))

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
