"""Every metric of the coordinator, declared once. Base units; a client's id is never a label."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

M = TypeVar("M", Counter, Gauge, Histogram)

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800)


RUNS_KEPT = 20
"""Runs that are over and whose metrics are still told, the latest ones: a scraper is to see how they ended."""


class Metrics:
    """The coordinator's metrics in a registry of their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._of_runs: list[Counter | Gauge | Histogram] = []
        self._over: dict[str, None] = {}
        """Runs that are over, in the order of their ends."""
        self._about_runs()
        self._about_clients()
        self._about_the_process()

    def _about_runs(self) -> None:
        self.rounds = self._counter("fl_rounds", "Rounds by how they ended: committed, abandoned.", "run", "outcome")
        self.attempts = self._counter("fl_attempts", "Attempts at filling a round.", "run")
        self.assignments = self._counter(
            "fl_assignments", "Assignments by final state: admitted, refused, failed, lost, cancelled.", "run", "state"
        )
        self.updates_refused = self._counter("fl_updates_refused", "Updates refused, by reason.", "run", "reason")
        self.update_conflicts = self._counter(
            "fl_update_conflicts", "Repeats of an update with another digest than the first.", "run"
        )
        self.phase_seconds = self._histogram("fl_phase_seconds", "Time spent in a phase of a round.", "run", "phase")
        self.round_seconds = self._histogram("fl_round_seconds", "From the first draw to the commit.", "run")
        self.round = self._gauge("fl_round", "Committed rounds.", "run")
        self.over_selection = self._gauge(
            "fl_over_selection", "Clients drawn for each update wanted, at the latest draw.", "run"
        )
        self.last_commit = self._gauge("fl_last_commit_timestamp_seconds", "Time of the last commit.", "run")
        self.evaluation = self._gauge(
            "fl_evaluation", "Latest evaluation on held-out data, by metric.", "run", "metric"
        )
        self.norm = self._gauge(
            "fl_norm", "L2 norms of the last round: update (mean), aggregate, direction.", "run", "of"
        )
        self.cosine = self._gauge(
            "fl_update_direction_cosine", "Cosine between the aggregate and the direction it was made with.", "run"
        )

    def _about_clients(self) -> None:
        self.clients = self._gauge("fl_clients", "Clients by state: present, suspect.", "state")
        self.quarantined = self._gauge("fl_clients_quarantined", "Clients that are not drawn for a while.")
        self.quarantines = self._counter("fl_quarantines", "Times that a client was quarantined.")
        self.sessions = self._gauge("fl_sessions", "Open sessions.")
        self.uploads_resumed = self._counter("fl_uploads_resumed", "Uploads that went on where one had stopped.")
        self.bytes = self._counter("fl_transfer_bytes", "Tensor bytes by direction and kind.", "direction", "kind")
        self.uploads_in_flight = self._gauge(
            "fl_uploads_in_flight_bytes", "Bytes of uploads announced and not complete."
        )

    def _about_the_process(self) -> None:
        self.rpc_seconds = self._histogram("fl_rpc_seconds", "Duration of calls.", "rpc", "code")
        self.commit_write_seconds = self._histogram("fl_commit_write_seconds", "Writing and syncing a commit.")
        self.loop_lag = self._histogram("fl_event_loop_lag_seconds", "How late the event loop woke up.")
        self.loop_tasks = self._gauge("fl_event_loop_tasks", "Tasks of the event loop.")
        self.certificate_expiry = self._gauge(
            "fl_certificate_expiry_timestamp_seconds",
            "When what the coordinator's TLS is made with ends: cert, its own; ca, the last of its clients'.",
            "file",
        )

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count the loop's tasks whenever somebody asks, in a thread of his: it costs the loop nothing."""
        self.loop_tasks.set_function(lambda: float(len(asyncio.all_tasks(loop))))

    def run_over(self, run_id: str) -> None:
        """A run has ended. What was told of the runs that ended long before it is told no more."""
        self.run_goes_on(run_id)
        self._over[run_id] = None
        for old in list(self._over)[:-RUNS_KEPT]:
            del self._over[old]
            for metric in self._of_runs:
                metric.remove_by_labels({"run": old})

    def run_goes_on(self, run_id: str) -> None:
        """A run that had ended was extended."""
        self._over.pop(run_id, None)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return self._kept(Counter(name, text, labels, registry=self.registry), labels)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return self._kept(Gauge(name, text, labels, registry=self.registry), labels)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return self._kept(Histogram(name, text, labels, registry=self.registry, buckets=_SECONDS), labels)

    def _kept(self, metric: M, labels: Sequence[str]) -> M:
        if "run" in labels:
            self._of_runs.append(metric)
        return metric
