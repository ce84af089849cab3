"""The coordinator's Prometheus metrics, declared once. The gauges of runs are in `runs/gauges.py`.

Only `fl_common` and `fl_server.rounds` are imported, so that every other part of the server can count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram

from fl_common.metrics import ANY, MetricFactory, Values, with_zeros
from fl_server.rounds.releases import DeviceState, Kind
from fl_server.rounds.state import Phase
from protos.fl.v1.training_pb2 import RefusalReason
from protos.wire import PROTOCOL_MAX

M = TypeVar("M", Counter, Histogram)
CERTIFICATE_PORTS = ("listen", "admin_listen")
"""Ports whose callers have certificates. `enroll_listen` has callers without one, which first only read the chain."""
TLS_PORTS = (*CERTIFICATE_PORTS, "enroll_listen", "workers.listen")
PORTS = (*TLS_PORTS, "health_listen", "metrics_listen")
"""Named by their settings."""
STATES = ("admitted", "refused", "failed", "lost", "cancelled")
"""Final states of an assignment."""
_NOT_ITS_FAULT = {"unspecified", "late", "not_assigned", "banned", "not_needed", "abandoned", "left_out"}
REASONS = tuple(
    reason
    for name in RefusalReason.keys()  # noqa: SIM118 # an enum wrapper is not iterable
    if (reason := name.removeprefix("REFUSAL_REASON_").lower()) not in _NOT_ITS_FAULT
)
"""Why an update of the cohort can be refused: the admission gate's RefusalReasons."""
REPORTS = ("unknown_run", "late", "not_assigned", "no_state")
"""Why a client's failure report can be refused."""
PHASES = tuple(phase.value for phase in Phase if phase is not Phase.ENDED)
CALL_KINDS = ("uploads", "downloads", "queries", "attends")
"""Calls of clients that have a limit of calls at once."""
CLIENT_LIMITS = (*CALL_KINDS, "calls", "fetches", "kept", "messages")
"""Limits that one client can exceed."""
ENROLLMENTS = (
    "issued", "repeated", "token", "used", "expired", "revoked", "name", "csr", "banned", "limited", "failed",
)  # fmt: skip
"""Results of requests at `enroll_listen`; all but the first two got no certificate."""
KINDS = tuple(kind.value for kind in Kind)
"""What is released."""
RELEASED = tuple(state.value for state in DeviceState)
"""What can become of a release on a device."""
STALENESS = (0, 1, 2, 4, 8, 16)

_LAG_PERIOD_S = 0.1
_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800)
_LAGS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


BUILD_INFO, WORKER_BUILD_INFO = "fl_build_info", "fl_worker_build_info"
"""Each process has one: so a query, and an alert, knows coordinators from workers."""
RUNS_KEPT = 20
"""Ended runs whose metrics are still reported, the latest ones, so that a scraper sees how they ended."""


class Metrics:
    """The metrics of a coordinator, or of a worker, in a registry of their own."""

    def __init__(self, registry: CollectorRegistry, build_info: str = BUILD_INFO) -> None:
        """build_info: BUILD_INFO or WORKER_BUILD_INFO."""
        self._build_info = build_info
        self.registry = registry
        self.factory = MetricFactory(registry)
        self.reported = ReportedRuns(self.factory)
        self._about_runs()
        self._about_clients()
        self._about_transfers()
        self._about_the_process()

    def _about_runs(self) -> None:
        counter, histogram = self.reported.counter, self.reported.histogram
        self.rounds = counter("fl_rounds", "Rounds, by how they ended.", outcome=("committed", "abandoned"))
        self.attempts = counter("fl_attempts", "Attempts at filling a round.")
        self.rounds_short = counter(
            "fl_rounds_short", "Rounds that were committed with fewer updates than they wanted, because clients failed."
        )
        self.quorum_missed = counter("fl_quorum_missed", "Attempts that closed with fewer updates than the quorum.")
        self.assignments = counter("fl_assignments", "Assignments, by how they ended.", state=STATES)
        self.updates_refused = counter("fl_updates_refused", "Refused updates, by reason.", reason=REASONS)
        self.update_conflicts = counter(
            "fl_update_conflicts", "Repeats of an update with another digest than the first."
        )
        self.weights_capped = counter(
            "fl_weights_capped", "Accepted updates with a weight that round.max_client_share reduced."
        )
        self.states_lost = counter("fl_states_lost", "Valid reports of lost client states.")
        self.not_finite = counter("fl_evaluations_not_finite", "Evaluations with a value that is not finite.")
        self.phase_seconds = histogram("fl_phase_seconds", "Time spent in a phase of a round.", _SECONDS, phase=PHASES)
        self.round_seconds = histogram("fl_round_seconds", "From the first draw to the commit.", _SECONDS)
        self.staleness = histogram(
            "fl_update_staleness_rounds",
            "Rounds from the model that an update was made from to the round that has it; late ones too.",
            STALENESS,
        )

    def _about_clients(self) -> None:
        factory = self.factory
        self.clients = factory.gauge(
            "fl_clients", "Clients, by whether they are attached.", state=("present", "suspect")
        )
        self.quarantined = factory.gauge("fl_clients_quarantined", "Clients that are not drawn for a while.")
        self.need_attention = factory.gauge(
            "fl_clients_need_attention",
            "Clients that need attention: `fl clients list --attention` has the reasons and the commands.",
        )
        self.release_devices = factory.gauge(
            "fl_release_devices",
            "Devices of the newest version of each model and package, by what became of it.",
            kind=KINDS,
            state=RELEASED,
        )
        self.releases_rolled_back = factory.counter(
            "fl_releases_rolled_back",
            "Releases that were taken back, by who decided it.",
            kind=KINDS,
            by=("rule", "operator"),
        )
        self.quarantines = factory.counter("fl_quarantines", "Times that a client was quarantined.")
        self.reports_refused = factory.counter(
            "fl_reports_refused", "Failure reports of clients that changed nothing, by reason.", reason=REPORTS
        )
        self.sessions = factory.gauge("fl_sessions", "Open sessions.")
        self.identity_conflicts = factory.counter(
            "fl_identity_conflicts",
            "Two daemons under one identity: the newcomer was sent away, or took the other one's place.",
            outcome=("refused", "fenced"),
        )
        self.contested = factory.gauge(
            "fl_clients_contested", "Identities that two daemons have used for longer than a restart takes."
        )

    def _about_transfers(self) -> None:
        factory = self.factory
        self.uploads_resumed = factory.counter("fl_uploads_resumed", "Uploads that were resumed at an offset.")
        self.bytes = factory.counter(
            "fl_transfer_bytes",
            "Tensor bytes, by direction and kind.",
            [("down", "model"), ("down", "direction"), ("down", "frozen"), ("down", "release"), ("up", "update")],
            direction=("down", "up"),
            kind=("model", "direction", "frozen", "release", "update"),
        )
        self.uploads_in_flight = factory.gauge(
            "fl_uploads_in_flight_bytes", "Bytes of uploads announced and not complete."
        )

        self.workers = factory.gauge("fl_workers", "Workers that are connected.")
        self.transfer_calls = factory.gauge(
            "fl_transfer_calls", "Calls of clients under way, by kind.", kind=CALL_KINDS
        )
        for kind in CALL_KINDS:  # an autoscaler takes a worker without the value for one with average load
            self.transfer_calls.labels(kind)
        self.transfer_limits = factory.counter(
            "fl_transfer_limits", "Calls refused, and streams ended, at a limit of one client.", limit=CLIENT_LIMITS
        )

    def _about_the_process(self) -> None:
        factory = self.factory
        self.rpc_seconds = factory.histogram("fl_rpc_seconds", "Duration of calls.", _SECONDS, rpc=ANY, code=ANY)
        self._about_connections(factory)
        self.commit_write_seconds = factory.histogram(
            "fl_commit_write_seconds", "Writing and syncing a commit.", _SECONDS
        )
        self.web_process_ends = factory.counter(
            "fl_web_process_ends", "Ends of the process that serves the web page, each followed by another start."
        )
        self.audit_rows = factory.counter(
            "fl_audit_rows",
            "Rows of the audit log: written; left out because too many waited for the ledger; and ends of the log that "
            "were found altered.",
            outcome=("written", "left_out", "altered"),
        )
        self.loop_lag = factory.histogram("fl_event_loop_lag_seconds", "How late the event loop woke up.", _LAGS)
        self.loop_tasks = factory.gauge("fl_event_loop_tasks", "Tasks of the event loop.")
        self.draining = factory.gauge(
            "fl_draining", "1 while the coordinator finishes its current work before it stops, else 0."
        )
        self.space = factory.disk_space("fl_state_dir")
        self._about_leadership(factory)
        self._about_certificates(factory)
        factory.build_info(self._build_info, PROTOCOL_MAX)
        factory.process_metrics()

    def _about_leadership(self, factory: MetricFactory) -> None:
        self.leading = factory.gauge("fl_leading", "1 while this coordinator leads, 0 while it waits as a standby.")
        self.ledger_epoch = factory.gauge("fl_ledger_epoch", "How often the ledger was opened: once by each leader.")
        self.standbys = factory.gauge("fl_standbys", "Standbys that the leader has heard of in the last 5 s.")
        self.standby_behind = factory.gauge(
            "fl_standby_behind_bytes", "Bytes of the newest checkpoints that this standby has not copied yet."
        )
        self.lease_age = factory.gauge(
            "fl_lease_age_seconds", "Seconds since a leader renewed its lease, or a standby read it."
        )
        self.object_seconds = factory.histogram(
            "fl_object_request_seconds",
            "Requests to the object store, with their repetitions, by kind and result.",
            _SECONDS,
            request=("put", "get", "list", "delete"),
            result=("ok", "missing", "failed"),
        )

    def _about_certificates(self, factory: MetricFactory) -> None:
        self.certificates = factory.certificates(
            "fl_certificate",
            "When what TLS is made with ends: cert, the coordinator's own; ca, the last of its clients'; authority, "
            "that of [enrollment]; worker, a worker's for the coordinator.",
            "cert",
            "ca",
            "authority",
            "worker",
        )
        self.enrollments = factory.counter(
            "fl_enrollments", "Requests for certificates at enroll_listen, by result.", result=ENROLLMENTS
        )
        self.certificates_issued = factory.counter(
            "fl_certificates_issued", "Certificates issued to devices.", why=("enrolled", "renewed", "reenrolled")
        )
        self.revoked_calls = factory.counter(
            "fl_revoked_calls", "Calls refused, and open calls ended, for a revoked certificate.", port=TLS_PORTS
        )

    def _about_connections(self, factory: MetricFactory) -> None:
        self.requests_refused = factory.counter(
            "fl_requests_refused",
            "Calls refused for their request, before it was parsed, or for calls that are open already.",
            port=PORTS,
            reason=("size", "values", "malformed", "calls"),
        )
        self.connections = factory.gauge("fl_connections", "TCP connections to a port, silent ones too.", port=PORTS)
        self.connections_limit = factory.gauge(
            "fl_connections_limit", "Limit of connections to a port; further ones are closed.", port=PORTS
        )
        self.handshakes = factory.counter("fl_tls_handshakes", "TLS handshakes that began.", port=TLS_PORTS)
        self.handshakes_failed = factory.counter(
            "fl_tls_handshakes_failed", "TLS handshakes that no call has followed within 15 s.", port=CERTIFICATE_PORTS
        )
        self.connections_used = factory.counter(
            "fl_connections_used", "Connections on which a first call was made.", port=PORTS
        )

    async def measure_lag(self) -> None:
        """Measure how late the event loop wakes up, without end."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_LAG_PERIOD_S)
            self.loop_lag.observe(max(0.0, time.monotonic() - before - _LAG_PERIOD_S))

    def watch(self, loop: asyncio.AbstractEventLoop, state_dir: Path) -> None:
        """Read the loop's tasks and the free disk space at each scrape, in the scraper's thread."""
        self.loop_tasks.set_function(lambda: float(len(asyncio.all_tasks(loop))))
        self.space.watch(state_dir)


class PerRun(Generic[M]):
    """One metric of all runs. Counts of a run that is not reported any more are discarded."""

    def __init__(self, metric: M, labels: Mapping[str, Values], reported: ReportedRuns) -> None:
        self._metric: M = metric
        self._labels, self._reported = labels, reported
        self._discarded: M = type(metric)("nowhere", "Of runs that ended long ago.", registry=None)

    def labels(self, run_id: str, *values: str) -> M:
        """The metric of a run."""
        return self._metric.labels(run_id, *values) if run_id in self._reported else self._discarded

    def start(self, run_id: str) -> None:
        """Report 0 for every combination of labels that is known beforehand."""
        with_zeros(self._metric, self._labels, run_id)

    def remove(self, run_id: str) -> None:
        """Remove all samples of the run."""
        self._metric.remove_by_labels({"run": run_id})


class ReportedRuns:
    """The runs that metrics are reported for."""

    def __init__(self, factory: MetricFactory) -> None:
        self._factory = factory
        self._metrics: list[PerRun[Any]] = []
        self._reported: set[str] = set()
        self._ended: dict[str, float] = {}
        """When those of them ended that are over."""

    def __contains__(self, run_id: object) -> bool:
        """Also from a scraper's thread."""
        return run_id in self._reported

    def counter(self, name: str, meaning: str, /, **labels: Values) -> PerRun[Counter]:
        """A MetricFactory's counter with the label `run` before the others."""
        labels = {"run": ANY, **labels}
        return self._kept(PerRun(self._factory.counter(name, meaning, **labels), labels, self))

    def histogram(self, name: str, meaning: str, buckets: tuple[float, ...], /, **labels: Values) -> PerRun[Histogram]:
        """A MetricFactory's histogram with the label `run` before the others."""
        labels = {"run": ANY, **labels}
        return self._kept(PerRun(self._factory.histogram(name, meaning, buckets, **labels), labels, self))

    def _kept(self, metric: PerRun[M]) -> PerRun[M]:
        self._metrics.append(metric)
        return metric

    def started(self, run_id: str) -> None:
        """A run was created, restored or extended."""
        self._ended.pop(run_id, None)
        if run_id not in self._reported:
            self._reported.add(run_id)
            for metric in self._metrics:
                metric.start(run_id)

    def removed(self, run_id: str) -> None:
        """A run was deleted."""
        self._ended.pop(run_id, None)
        if run_id in self._reported:
            self._reported.discard(run_id)
            for metric in self._metrics:
                metric.remove(run_id)

    def ended(self, run_id: str, ended_at: float) -> None:
        """A run has ended. Runs that ended long before it are not reported any more."""
        self._reported.add(run_id)
        self._ended[run_id] = ended_at
        for old in sorted(self._ended, key=self._ended.__getitem__)[:-RUNS_KEPT]:
            del self._ended[old]
            self._reported.discard(old)
            for metric in self._metrics:
                metric.remove(old)
