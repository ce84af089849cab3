"""Writes docs/operation/metrics.md from the registries of coordinator and daemon: `python -m docs.source.metrics`.

Names, types, labels with their values and meanings come from the declarations of the metrics. This module adds only the
values that need attention, and the alert for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from docs.source.keys import ROOT
from fl_client.monitoring.metrics import Metrics as ClientMetrics
from fl_common.metrics import Declaration
from fl_server.metrics import WORKER_BUILD_INFO
from fl_server.metrics import Metrics as ServerMetrics
from fl_server.runs.gauges import RunsCollector
from fl_server.runs.table import RunTable

PAGE = ROOT / "docs/operation/metrics.md"

WORRY = {
    # Runs.
    "fl_rounds_total": "`abandoned` grows: a run was ended during a round.",
    "fl_attempts_total": "It grows much faster than committed rounds: cohorts do not deliver.",
    "fl_rounds_short_total": "It grows: `fl run show RUN` says what the failures have in common.",
    "fl_quorum_missed_total": "It grows repeatedly: FlQuorumMissed.",
    "fl_assignments_total": "`failed` and `lost` are a large share: FlDropOutHigh.",
    "fl_updates_refused_total": "A large share of all updates: FlUpdatesRefusedHigh. `not_finite`: the learning rate.",
    "fl_update_conflicts_total": "It grows: two devices share an identity, or one lost its disk.",
    "fl_weights_capped_total": "It grows: one client has more examples than `round.max_client_share` allows.",
    "fl_evaluations_not_finite_total": "It grows: FlEvaluationNotFinite.",
    "fl_phase_seconds": "`collecting` near the deadline: slow clients. `committing` grows: the disk.",
    "fl_round_seconds": "It grows while `fl_clients_eligible` does not fall: slow links, or throttled devices.",
    "fl_update_staleness_rounds": "Much above 0: updates arrive too late to count; the deadline is too short.",
    "fl_runs": "`failed` grows: FlRunFailed.",
    "fl_run_state": "`failed`: FlRunFailed. `waiting` for long: too few clients; FlClientsGone.",
    "fl_run_cannot_write": "1: a fault of the disk or the database; after a while FlNoCommit.",
    "fl_round": "No change in state `running`: FlNoCommit.",
    "fl_clients_eligible": "Below `fl_clients_per_round`: the next round waits.",
    "fl_clients_not_drawn": "Why a run waits: `lost` are away, `task` lack its task; `fl run show` has the remedy.",
    "fl_buffered_updates": "It stays below the goal while the run waits: too few clients are idle.",
    "fl_model_versions": "It nears `round.max_staleness`: some clients are far slower than others.",
    "fl_over_selection": "It rises towards 2: many clients drop out.",
    "fl_last_commit_timestamp_seconds": "Long ago in state `running`: FlNoCommit.",
    "fl_clients_below_due": "Above 0: FlClientsBelowDue.",
    "fl_training_loss": "It rises from round to round, or is NaN.",
    "fl_evaluation": "Far from `fl_evaluation_best`: FlAccuracyFalling.",
    "fl_client_evaluation": "`worst_decile` falls while `mean` does not: the model gets worse for some devices.",
    "fl_norm": "`update_largest` is many times `update`: a faulty or malicious client; see `round.max_relative_norm`.",
    "fl_update_direction_cosine": "Below 0 for long: the momentum is opposed to the clients' updates.",
    # Clients.
    "fl_clients": "`suspect` jumps: a network fault. `present` falls: FlClientsGone.",
    "fl_clients_quarantined": "More than a few: a faulty release of the daemon, or an attack.",
    "fl_clients_need_attention": "Above 0: FlClientsNeedAttention.",
    "fl_release_devices": "`failed` or `refused` above 0: `fl release show` or `fl packages show` has the reasons.",
    "fl_releases_rolled_back_total": "`rule` grows: FlReleaseRolledBack.",
    "fl_quarantines_total": "It grows: `fl clients list` names the clients with refused updates, and the reasons.",
    "fl_identity_conflicts_total": "It grows: two daemons use one identity; the log names both addresses.",
    "fl_clients_contested": "Above 0: FlIdentityShared.",
    "fl_sessions": "Near `limits.max_clients`: further clients are refused.",
    "fl_uploads_resumed_total": "It grows fast: unreliable links.",
    "fl_uploads_in_flight_bytes": "It only grows: uploads stall.",
    "fl_workers": "Fewer than were started: see their logs. 0 with `[workers]`: no model and no update moves.",
    "fl_transfer_calls": "`downloads` is high and `fl_transfer_bytes_total` does not grow: clients that read nothing."
    " Very different at two workers: FlWorkerImbalance.",
    "fl_transfer_limits_total": "It grows: see `client_limited` in the log and the "
    "[limits](../measurements/reliability.md#limits).",
    # The process.
    "fl_rpc_seconds": "Codes `INTERNAL` or `UNKNOWN`: a fault; see the log. `UNAVAILABLE`: busy, or a full"
    " disk. `CANCELLED`: the caller hung up or its deadline passed, as at the end of every `Attend`.",
    "fl_leading": "No coordinator has 1: FlNoLeader.",
    "fl_ledger_epoch": "It grows often: leaders are killed, or cut off from the database.",
    "fl_standbys": "0 where there should be one: FlNoStandby.",
    "fl_standby_behind_bytes": "Above 0 for minutes: FlStandbyBehind.",
    "fl_lease_age_seconds": "Near `lease_s`: the database does not answer.",
    "fl_object_request_seconds": "It rises, or `failed` grows: FlStoreSlow.",
    "fl_commit_write_seconds": "It rises: a slow disk or database.",
    "fl_event_loop_lag_seconds": "It rises: FlEventLoopLag.",
    "fl_event_loop_tasks": "It only grows while sessions do not.",
    "fl_state_dir_available_bytes": "Little: FlStateDirFilling. At 0 runs pause, and nothing is lost.",
    "fl_requests_refused_total": "It grows: the log's `rpc_refused` lines name caller and address.",
    "fl_connections": "At `fl_connections_limit`: strangers, or more clients than `limits.max_clients`.",
    "fl_tls_handshakes_failed_total": "It rises: FlHandshakesFailing. Expired certificates, or those of another CA.",
    "fl_audit_rows_total": "`altered`: FlAuditAltered. `left_out` grows: FlAuditRowsLeftOut.",
    "fl_web_process_ends_total": "It grows: the web page cannot start, and browsers get status 503; the log has the"
    " reason before `web_process_ended`.",
    "fl_certificate_expiry_timestamp_seconds": "Soon, compared with its lifetime: FlCertificateExpiring.",
    "fl_enrollments_total": "`token` grows: somebody guesses, or uses old tokens; the log has the address."
    " `limited`: more devices at once than `enrollment.requests_per_s` allows.",
    "fl_revoked_calls_total": "It grows for long: a device with a revoked certificate calls; the log has its name.",
    "process_start_time_seconds": "It changes often: FlCoordinatorRestarting.",
    "process_open_fds": "Near `process_max_fds`.",
    "process_resident_memory_bytes": "It only grows, over many rounds.",
    # The daemon.
    "fl_client_training_seconds": "Near the run's deadline: use fewer local steps, or a longer deadline.",
    "fl_client_training_loss": "It falls on other devices and not here: check this device's data.",
    "fl_client_releases_total": "`refused` or `failed` grows: the log has the reason.",
    "fl_client_updates_total": "`refused` grows: see the reasons in the log.",
    "fl_client_last_update_timestamp_seconds": "Long ago, and `fl_client_attached` is 1: it is not drawn, or refused.",
    "fl_client_work_failures_total": "It grows: see the reasons in the log.",
    "fl_client_attached": "0 for long: the coordinator or the link is down; run `fl-client doctor`.",
    "fl_client_connection_attempts_total": "`failed` grows: as for `fl_client_attached`.",
    "fl_client_certificate_expiry_timestamp_seconds": "Soon, compared with its lifetime: FlCertificateExpiring.",
    "fl_client_may_train": "0 for longer than intended: check its [gates](../devices/gates.md).",
    "fl_client_device_memory_bytes": "`reserved` near the card's memory: a smaller batch.",
    "fl_client_state_dir_available_bytes": "Too little for a model and an update.",
}
"""Values that need attention, by metric; many metrics only explain others."""

_INTRO = """# Metrics

`python -m docs.source.metrics` generates this page from the registries of coordinator and daemon; a test compares them.

Both serve plain HTTP `/metrics` on `metrics_listen`, in a separate thread: a scrape delays neither rounds nor training.
Values are in base units (`_seconds`, `_bytes`; a `_timestamp_seconds` is Unix time). Counters end in `_total`,
histograms are named, all others are gauges. No label has a client's name: 10,000 clients make as many series as ten.
What to act on is in italics. Names that begin with Fl are alerts of the [runbook](runbook.md).

Series with a label `run` exist from the creation of the run, with the value 0 before the first event, until 20 other
runs have ended after it. Gauges have the same values after a restart; counters and histograms start at 0 again, which
`rate()` and `increase()` take into account. Without Prometheus, `fl run show` prints a run's main values."""

_RUNS = "## The coordinator: metrics of each run"
_COORDINATOR = "## The coordinator: clients and process"
_WORKER = """## A worker

It has the metrics of the coordinator too, and of those of the process its own values."""
_DAEMON = """## A daemon

Only if `metrics_listen` is set. The scrape target identifies the device."""
_PROCESS = "## Every process"


def server_metrics() -> ServerMetrics:
    """The metrics of a coordinator without runs, with the gauges of runs."""
    metrics = ServerMetrics(CollectorRegistry())
    RunsCollector(metrics, RunTable())
    return metrics


def worker_metrics() -> ServerMetrics:
    """The metrics of a worker."""
    return ServerMetrics(CollectorRegistry(), WORKER_BUILD_INFO)


def page() -> str:
    """The whole page."""
    server, client = server_metrics().factory.declared, ClientMetrics().factory.declared
    worker = [metric for metric in worker_metrics().factory.declared if metric not in server]
    runs = [metric for metric in server if "run" in metric.labels or metric.name == "fl_runs"]
    own = [metric for metric in server if metric not in runs and metric.name.startswith("fl_")]
    daemon = [metric for metric in client if metric.name.startswith("fl_")]
    both = [metric for metric in server if not metric.name.startswith("fl_")]
    if unknown := WORRY.keys() - {metric.name for metric in (*server, *client)}:
        raise LookupError(f"expected only declared metrics in WORRY, found {', '.join(sorted(unknown))}")
    tables = ((_RUNS, runs), (_COORDINATOR, own), (_WORKER, worker), (_DAEMON, daemon), (_PROCESS, both))
    return "\n\n".join([_INTRO, *(f"{heading}\n\n{_table(declared)}" for heading, declared in tables)]) + "\n"


def _table(declared: Iterable[Declaration]) -> str:
    return "\n".join(
        f"- `{metric.name}`{', histogram' if metric.kind == 'histogram' else ''}{_labels(metric)}: {metric.meaning}"
        + (f" *{worry}*" if (worry := _worry(metric.name)) else "")
        for metric in declared
    )


def _labels(declared: Declaration) -> str:
    values = ", ".join(
        f"`{name}`" + (f" ({', '.join(values)})" if values else "") for name, values in declared.labels.items()
    )
    return f" by {values}" if values else ""


def _worry(name: str) -> str:
    """With each alert's name as a link into the runbook."""
    return re.sub(r"\bFl[A-Z]\w+", lambda alert: f"[{alert[0]}](runbook.md#{alert[0].lower()})", WORRY.get(name, ""))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
