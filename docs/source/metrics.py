"""Writes docs/metrics.md from the registries of coordinator and daemon: `python -m docs.source.metrics` makes it anew.

Names, types, labels with their values and meanings come from where the metrics are declared. What stands here is only
when to worry, and which alert then speaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from docs.source.keys import ROOT
from fl_client.metrics import Metrics as ClientMetrics
from fl_server.metrics import Metrics as ServerMetrics
from protos.metrics import Declaration

PAGE = ROOT / "docs" / "metrics.md"

UNITS = {"time_seconds": "s, Unix time", "timestamp_seconds": "s, Unix time", "seconds": "s", "bytes": "bytes"}
"""By how a name ends, the longest first."""

WORRY = {
    # Runs.
    "fl_rounds_total": "`abandoned` grows: a run was ended in the middle of a round.",
    "fl_attempts_total": "It grows much faster than committed rounds: cohorts do not deliver.",
    "fl_quorum_missed_total": "It grows again and again: FlQuorumMissed.",
    "fl_assignments_total": "`failed` and `lost` are a large share: FlDropOutHigh.",
    "fl_updates_refused_total": "A large share of what comes: FlUpdatesRefusedHigh. `not_finite`: the learning rate.",
    "fl_update_conflicts_total": "It grows: two devices share an identity, or one lost its disk.",
    "fl_weights_capped_total": "It grows: one client has more examples than `round.max_client_share` lets count.",
    "fl_evaluations_not_finite_total": "It grows: FlEvaluationNotFinite.",
    "fl_phase_seconds": "`collecting` near the deadline: slow clients. `committing` grows: the disk.",
    "fl_round_seconds": "It grows while `fl_clients_eligible` does not fall: links, or devices that are throttled.",
    "fl_update_staleness_rounds": "Much above 0: updates come too late to count; the deadline is too short.",
    "fl_runs": "`failed` grows: FlRunFailed.",
    "fl_run_state": "`failed`: FlRunFailed. `waiting` for long: too few clients; FlClientsGone.",
    "fl_run_cannot_write": "1: the disk, or the database; after a while FlNoCommit.",
    "fl_round": "It stands still in state `running`: FlNoCommit.",
    "fl_clients_eligible": "Below `fl_clients_per_round`: the next round waits.",
    "fl_over_selection": "It climbs towards 2: many drop out.",
    "fl_last_commit_timestamp_seconds": "Long ago in state `running`: FlNoCommit.",
    "fl_training_loss": "It rises round by round, or has no number.",
    "fl_evaluation": "Far from `fl_evaluation_best`: FlAccuracyFalling.",
    "fl_client_evaluation": "`worst_decile` falls while `mean` does not: the model leaves some devices behind.",
    "fl_norm": "`update_largest` is many times `update`: a bad or malicious client; see `round.max_relative_norm`.",
    "fl_update_direction_cosine": "Below 0 for long: the momentum points away from what clients find.",
    # Clients.
    "fl_clients": "`suspect` jumps: the network. `present` falls: FlClientsGone.",
    "fl_clients_quarantined": "More than a few: a bad release of the daemon, or an attack.",
    "fl_quarantines_total": "It grows: `fl clients list` says whose updates were refused, and why.",
    "fl_identity_conflicts_total": "It grows: two daemons use one identity; the log names both addresses.",
    "fl_clients_contested": "Above 0: FlIdentityShared.",
    "fl_sessions": "Near `limits.max_clients`: newcomers are turned away.",
    "fl_uploads_resumed_total": "It grows fast: links that break.",
    "fl_uploads_in_flight_bytes": "It only grows: uploads stall.",
    "fl_transfer_calls": "`downloads` is high and `fl_transfer_bytes_total` does not grow: clients that read nothing.",
    "fl_transfer_limits_total": "It grows: the log has `client_limited`; [limits](reliability.md#limits).",
    # The process.
    "fl_rpc_seconds": "Codes `INTERNAL` or `UNKNOWN`: a fault; see the log. `UNAVAILABLE`: busy, or no room.",
    "fl_commit_write_seconds": "It rises: the disk, or the database.",
    "fl_event_loop_lag_seconds": "It rises: FlEventLoopLag.",
    "fl_event_loop_tasks": "It only grows while sessions do not.",
    "fl_state_dir_available_bytes": "Little: FlStateDirFilling. At 0 the coordinator waits, and loses nothing.",
    "fl_requests_refused_total": "It grows: the log's `rpc_refused` lines name caller and address.",
    "fl_connections": "At `fl_connections_limit`: strangers, or more clients than `limits.max_clients`.",
    "fl_tls_handshakes_total": "It outgrows `fl_connections_used_total`: strangers, or certificates of another CA.",
    "fl_certificate_expiry_timestamp_seconds": "Soon: FlCertificateExpiring.",
    "process_start_time_seconds": "It changes often: FlCoordinatorRestarting.",
    "process_open_fds": "Near `process_max_fds`.",
    "process_resident_memory_bytes": "It only grows, over many rounds.",
    # The daemon.
    "fl_client_training_seconds": "Near the run's deadline: fewer local steps, or a longer deadline.",
    "fl_client_training_loss": "Not falling here while it does elsewhere: this device's data.",
    "fl_client_updates_total": "`refused` grows: the log says why.",
    "fl_client_last_update_timestamp_seconds": "Long ago, and `fl_client_attached` is 1: it is not drawn, or refused.",
    "fl_client_work_failures_total": "It grows: the log has each one in words.",
    "fl_client_attached": "0 for long: the coordinator is away, or the link; `fl-client doctor` looks.",
    "fl_client_connection_attempts_total": "`failed` grows: as above.",
    "fl_client_certificate_expiry_timestamp_seconds": "Soon: FlCertificateExpiring.",
    "fl_client_may_train": "0 for longer than the owner means: its [gates](gates.md).",
    "fl_client_device_memory_bytes": "`reserved` near the card's memory: a smaller batch.",
    "fl_client_state_dir_available_bytes": "Too little for a model and an update.",
}
"""By name; many metrics are only there to understand others."""

_INTRO = """# Metrics

Made by `python -m docs.source.metrics` from the registries of coordinator and daemon; a test compares.

Both serve plain HTTP `/metrics` on `metrics_listen`, in a thread of its own.
A scrape holds neither rounds nor training up.
Everything is in base units, and counters end in `_total`.
No label has a client's name: 10,000 clients make no more series than ten.
Names that begin with Fl are alerts; the [runbook](runbook.md) says what to do about each.

Of runs:

- Series with a label `run` are there from the moment that the run is made, at 0 where nothing has happened yet.
  So `rate()` and `increase()` see the first event too.
- They stay while the run goes on, and until 20 other runs have ended after it.
- Gauges are read from the run itself at the moment of the scrape, and after a restart they say what they said before.
  Counters and histograms begin at 0 again, which `rate()` and `increase()` know.
- Without Prometheus: `fl run show` has what matters of one run, from the ledger."""

_RUNS = "## The coordinator: of each run"
_COORDINATOR = "## The coordinator: clients and process"
_DAEMON = """## A daemon

Off until `metrics_listen` is set.
Which device it is, the scrape target says."""
_PROCESS = "## Both processes"


def page() -> str:
    """The whole page."""
    server, client = ServerMetrics(CollectorRegistry()).kit.declared, ClientMetrics().kit.declared
    runs = [each for each in server if "run" in each.labels or each.name == "fl_runs"]
    own = [each for each in server if each not in runs and each.name.startswith("fl_")]
    daemon = [each for each in client if each.name.startswith("fl_")]
    both = [each for each in server if not each.name.startswith("fl_")]
    if unknown := WORRY.keys() - {each.name for each in (*server, *client)}:
        raise LookupError(f"expected WORRY to speak of declared metrics, found {', '.join(sorted(unknown))}")
    tables = ((_RUNS, runs), (_COORDINATOR, own), (_DAEMON, daemon), (_PROCESS, both))
    return "\n\n".join([_INTRO, *(f"{heading}\n\n{_table(declared)}" for heading, declared in tables)]) + "\n"


def _table(declared: Iterable[Declaration]) -> str:
    lines = ["| name | type | unit | labels | meaning | when to worry |", "| --- | --- | --- | --- | --- | --- |"]
    for each in declared:
        cells = (f"`{each.name}`", each.kind, unit(each.name), _labels(each), each.meaning, _worry(each.name))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def unit(name: str) -> str:
    """The unit that a name ends with; none for counts and for what has no unit."""
    counted = name.removesuffix("_total")
    return next((words for ending, words in UNITS.items() if counted.endswith(f"_{ending}")), "")


def _labels(declared: Declaration) -> str:
    return ", ".join(
        f"`{name}`" + (f" ({', '.join(values)})" if values else "") for name, values in declared.labels.items()
    )


def _worry(name: str) -> str:
    """With each alert's name as a link into the runbook."""
    return re.sub(r"\bFl[A-Z]\w+", lambda alert: f"[{alert[0]}](runbook.md#{alert[0].lower()})", WORRY.get(name, ""))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
