"""What happens in a run, counted once for both who look: for Prometheus, and for the account of the round under way."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fl_server.account import MOST_STALE
from fl_server.metrics import Metrics
from fl_server.progress import RoundLog
from fl_server.round_state import Phase
from fl_server.step import StepNorms


class Tally:
    """The counting of one run. Lives on the event loop."""

    def __init__(self, metrics: Metrics, run_id: str, log: RoundLog) -> None:
        self._metrics, self._id, self._log = metrics, run_id, log

    def assignment(self, state: str) -> None:
        """An assignment has ended: "admitted", "refused", "failed", "lost" or "cancelled"."""
        self._metrics.assignments.labels(self._id, state).inc()
        self._log.account.assignments[state] += 1

    def refused(self, reason: str) -> None:
        """An update was refused, and the refusal is going to be entered."""
        self._metrics.updates_refused.labels(self._id, reason).inc()
        self._log.account.refused[reason] += 1

    def stale(self, rounds: int) -> None:
        """A word was said on an update that was made from the model of so many rounds ago."""
        self._metrics.staleness.labels(self._id).observe(rounds)
        self._log.account.staleness[min(rounds, MOST_STALE)] += 1

    def capped(self, clients: int) -> None:
        """So many clients' examples weighed less than they are."""
        self._metrics.weights_capped.labels(self._id).inc(clients)

    def quorum_missed(self) -> None:
        """An attempt closed with fewer updates than the quorum."""
        self._metrics.quorum_missed.labels(self._id).inc()
        self._log.account.quorum_missed += 1

    def phase(self, phase: Phase, seconds: float) -> None:
        """A phase is over. That a run was over before it was extended is none."""
        if phase is not Phase.ENDED:
            self._metrics.phase_seconds.labels(self._id, phase.value).observe(seconds)
            spent = self._log.account.seconds
            spent[phase.value] = round(spent.get(phase.value, 0.0) + seconds, 3)

    def stepped(self, norms: StepNorms, updates: Sequence[float]) -> None:
        """The round's step is computed. updates: the norms of those that it was made of, as they came."""
        account = self._log.account
        account.norms = {
            "update": fmean(updates),
            "update_smallest": min(updates),
            "update_largest": max(updates),
            "aggregate": norms.aggregate,
            "direction": norms.direction,
        }
        account.cosine = norms.cosine if norms.direction else None
