"""Every metric of the coordinator, declared once; those that are read from its runs are in `runs.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from fl_server.metrics.per_run import ToldRuns
from fl_server.metrics.runs import RunsCollector
from protos.metrics import ANY, Kit

if TYPE_CHECKING:
    from fl_server.run import Run

TLS_PORTS = ("listen", "admin_listen")
PORTS = (*TLS_PORTS, "health_listen", "metrics_listen")
"""By the settings that name them."""
STATES = ("admitted", "refused", "failed", "lost", "cancelled")
"""How an assignment can end."""
REASONS = ("layout", "size", "digest", "not_finite", "norm", "state_epoch", "header")
"""Why an update can be refused that would have been taken: the gate's RefusalReasons."""
REPORTS = ("unknown_run", "late", "not_assigned", "no_state")
"""Why a failure that a client reports can be refused."""
PHASES = ("selecting", "collecting", "reducing", "stepping", "committing", "evaluating")
CALL_KINDS = ("uploads", "downloads", "queries", "attends")
"""Calls of clients that have a limit of calls at once."""
CLIENT_LIMITS = (*CALL_KINDS, "calls", "fetches", "kept", "messages")
"""Limits that one client can exceed."""
STALENESS = (0, 1, 2, 4, 8, 16)

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800)
_LAGS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics:
    """The coordinator's metrics in a registry of their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.kit = Kit(registry)
        self.told = ToldRuns(self.kit)
        self._of_runs = RunsCollector(self.kit, self.told)
        self._about_runs()
        self._about_clients()
        self._about_the_process()

    def _about_runs(self) -> None:
        counter, histogram = self.told.counter, self.told.histogram
        self.rounds = counter("fl_rounds", "Rounds, by how they ended.", outcome=("committed", "abandoned"))
        self.attempts = counter("fl_attempts", "Attempts at filling a round.")
        self.quorum_missed = counter("fl_quorum_missed", "Attempts that closed with fewer updates than the quorum.")
        self.assignments = counter("fl_assignments", "Assignments, by how they ended.", state=STATES)
        self.updates_refused = counter("fl_updates_refused", "Updates refused, by why.", reason=REASONS)
        self.update_conflicts = counter(
            "fl_update_conflicts", "Repeats of an update with another digest than the first."
        )
        self.weights_capped = counter(
            "fl_weights_capped", "Accepted updates whose examples weighed less, for round.max_client_share."
        )
        self.states_lost = counter("fl_states_lost", "Client states that clients reported as lost, rightly.")
        self.not_finite = counter("fl_evaluations_not_finite", "Evaluations with a value that is not finite.")
        self.phase_seconds = histogram("fl_phase_seconds", "Time spent in a phase of a round.", _SECONDS, phase=PHASES)
        self.round_seconds = histogram("fl_round_seconds", "From the first draw to the commit.", _SECONDS)
        self.staleness = histogram(
            "fl_update_staleness_rounds",
            "Rounds from the model that an update was made from to the round it came in; late ones too.",
            STALENESS,
        )

    def _about_clients(self) -> None:
        kit = self.kit
        self.clients = kit.gauge("fl_clients", "Clients, by whether they are attached.", state=("present", "suspect"))
        self.quarantined = kit.gauge("fl_clients_quarantined", "Clients that are not drawn for a while.")
        self.quarantines = kit.counter("fl_quarantines", "Times that a client was quarantined.")
        self.reports_refused = kit.counter(
            "fl_reports_refused", "Failures that clients reported and that changed nothing, by why.", reason=REPORTS
        )
        self.sessions = kit.gauge("fl_sessions", "Open sessions.")
        self.identity_conflicts = kit.counter(
            "fl_identity_conflicts",
            "Two daemons under one identity: the newcomer was sent away, or took the other one's place.",
            outcome=("refused", "fenced"),
        )
        self.contested = kit.gauge(
            "fl_clients_contested", "Identities that two daemons have been using for longer than a restart takes."
        )
        self.uploads_resumed = kit.counter("fl_uploads_resumed", "Uploads that went on where one had stopped.")
        self.bytes = kit.counter(
            "fl_transfer_bytes",
            "Tensor bytes, by direction and kind.",
            [("down", "model"), ("down", "direction"), ("down", "frozen"), ("up", "update")],
            direction=("down", "up"),
            kind=("model", "direction", "frozen", "update"),
        )
        self.uploads_in_flight = kit.gauge("fl_uploads_in_flight_bytes", "Bytes of uploads announced and not complete.")

        self.transfer_calls = kit.gauge("fl_transfer_calls", "Calls of clients under way, by kind.", kind=CALL_KINDS)
        self.transfer_limits = kit.counter(
            "fl_transfer_limits", "Calls refused, and streams ended, at a limit of one client.", limit=CLIENT_LIMITS
        )

    def _about_the_process(self) -> None:
        kit = self.kit
        self.rpc_seconds = kit.histogram("fl_rpc_seconds", "Duration of calls.", _SECONDS, rpc=ANY, code=ANY)
        self._about_connections(kit)
        self.commit_write_seconds = kit.histogram("fl_commit_write_seconds", "Writing and syncing a commit.", _SECONDS)
        self.loop_lag = kit.histogram("fl_event_loop_lag_seconds", "How late the event loop woke up.", _LAGS)
        self.loop_tasks = kit.gauge("fl_event_loop_tasks", "Tasks of the event loop.")
        self.draining = kit.gauge(
            "fl_draining", "1 while the coordinator lets what is under way finish, to end, else 0."
        )
        self.space = kit.space("fl_state_dir")
        self.certificate_expiry = kit.gauge(
            "fl_certificate_expiry_timestamp_seconds",
            "When what TLS is made with ends: cert, the coordinator's own; ca, the last of its clients'.",
            file=("cert", "ca"),
        )
        kit.build("fl_build_info")
        kit.process()

    def _about_connections(self, kit: Kit) -> None:
        self.requests_refused = kit.counter(
            "fl_requests_refused",
            "Calls refused for their request, before it was parsed, or for calls that are open already.",
            port=PORTS,
            reason=("size", "values", "malformed", "calls"),
        )
        self.connections = kit.gauge("fl_connections", "TCP connections to a port, silent ones too.", port=PORTS)
        self.connections_limit = kit.gauge(
            "fl_connections_limit", "Connections to a port from which on further ones are closed.", port=PORTS
        )
        self.handshakes = kit.counter("fl_tls_handshakes", "TLS handshakes that began.", port=TLS_PORTS)
        self.connections_used = kit.counter(
            "fl_connections_used", "Connections on which a first call was made, with TLS by a known certificate.",
            port=PORTS,
        )  # fmt: skip

    def watch(self, loop: asyncio.AbstractEventLoop, state_dir: Path) -> None:
        """Look at the loop's tasks and the disk when somebody asks, in a thread of his: it costs the loop nothing."""
        self.loop_tasks.set_function(lambda: float(len(asyncio.all_tasks(loop))))
        self.space.look_at(state_dir)

    def watch_runs(self, runs: Callable[[], Sequence[Run]]) -> None:
        """Where the runs are to be found that are looked at whenever somebody asks."""
        self._of_runs.runs = runs
