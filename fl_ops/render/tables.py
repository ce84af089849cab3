"""Messages of the Admin service as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fl_common import units
from fl_common.units import NOTHING
from fl_ops.render.fitted import FittedTable
from fl_ops.render.runs import waits
from fl_ops.render.runs.cohort import by_phase, cohort_table
from fl_ops.render.runs.criterion import criterion_of, shown_metric
from fl_ops.render.runs.health import health_rows, lowest_loss
from fl_ops.render.runs.progress import Row
from fl_ops.render.runs.rounds import local_epochs_table, round_details_table, rounds_table
from fl_ops.render.runs.schedules import schedules_text
from fl_ops.render.runs.target import TargetCost
from fl_ops.render.states import (
    client_labels,
    client_state,
    first_of,
    latest_failure,
    member_rows,
    policy_row,
    run_state,
    shares_row,
)
from protos.fl.v1 import admin_pb2

_STATE_STYLES = {
    "running": "green",
    "present": "green",
    "completed": "bold green",
    "waiting": "yellow",
    "paused": "yellow",
    "suspect": "yellow",
    "failed": "bold red",
    "not loaded": "bold red",
    "banned": "red",
}
_NAMES_SHOWN = 10
"""Clients of a cohort that are listed by name."""


def rounds_text(run: admin_pb2.RunStatus) -> str:
    """Committed rounds and the target number: 12 of 40."""
    return f"{run.rounds_done} of {run.spec.stop.rounds}" if run.spec.stop.rounds else str(run.rounds_done)


def runs_table(runs: Sequence[admin_pb2.RunStatus]) -> RenderableType:
    """A row for each run. There is a column of owners if a run has one."""
    owned = any(run.spec.owner for run in runs)
    table = FittedTable(
        (
            "Run",
            "State",
            "Task",
            "Algorithm",
            *(["Owner"] if owned else []),
            ">Rounds",
            ">Best",
            "Now",
            ">Down",
            ">Up",
            "Created",
        ),
        optional=("Up", "Down", "Created", *(["Owner"] if owned else []), "Task", "Algorithm", "Now"),
    )
    for run in runs:
        table.add_row(
            _text(run.run_id), _state(run_state(run)), _text(run.spec.task.name), _text(run.spec.algorithm.name),
            *([_text(run.spec.owner or NOTHING)] if owned else []),
            rounds_text(run), _text(metric_of(run, run.best)), _text(waits.current(run)), units.size(run.bytes_down),
            units.size(run.bytes_up), units.moment(run.created),
        )  # fmt: skip
    if not runs:
        return Text("no runs yet: `fl run create config.toml` makes one")
    return Group(table, *(_text(line) for run in runs if (line := _below(run))))


def _below(run: admin_pb2.RunStatus) -> str:
    """A line below the list of runs, for a run that is not loaded or that waits."""
    if run.state == admin_pb2.RUN_STATE_UNSPECIFIED:
        return f"{run.run_id}: {run.reason}"
    return f"{run.run_id}: {waits.line(run)}" if run.waiting_for else ""


def run_details(
    response: admin_pb2.GetRunResponse,
    target: TargetCost | None = None,
    *,
    details: bool = False,
    cohort: admin_pb2.ListCohortResponse | None = None,
) -> RenderableType:
    """One run and its committed rounds.

    target: the cost of reaching it; details: a second table of the rounds; cohort: the clients of the round under way.
    """
    rows = [Row.committed(summary) for summary in response.rounds]
    more: list[RenderableType] = [Text(), round_details_table(response.rounds)] if details else []
    if details and any(summary.local_epochs for summary in response.rounds):
        more += [Text(), local_epochs_table(response.rounds)]
    rounds = rounds_table(rows, shown_metric(response.run))
    clients: list[RenderableType] = [] if cohort is None else [Text(), by_phase(cohort), cohort_table(cohort)]
    return Group(run_summary(response.run, target), *clients, Text(), rounds, *more)


def run_summary(run: admin_pb2.RunStatus, target: TargetCost | None = None) -> RenderableType:
    """One run as names and values."""
    grid = Table.grid(padding=(0, 2))
    cohort = first_of(run.cohort[:_NAMES_SHOWN], len(run.cohort))
    cohort = f"{run.admitted}/{len(run.cohort)} updates of {cohort}" if run.cohort else ""
    rows: list[tuple[str, str | Text]] = [
        ("run", _text(run.run_id)),
        ("state", _state(run_state(run))),
        ("why", _text(run.reason)),
        ("owner", _text(run.spec.owner)),
        ("task", _text(run.spec.task.name)),
        ("algorithm", _text(run.spec.algorithm.name)),
        ("schedules", _text(schedules_text(run.spec))),
        ("rounds", rounds_text(run)),
        ("phase", _text(f"{run.phase}, attempt {run.attempt}" if run.phase else "")),
        ("cohort", _text(cohort)),
        ("awaited", _text(waits.awaited(run))),
        ("waits for", _text(run.waiting_for)),
        ("failed", _text(latest_failure(run))),
        ("eligible clients", str(run.eligible_clients)),
        ("over-selection", f"{run.over_selection:.2f} clients for each update" if run.over_selection > 1 else ""),
        *((name, _text(text)) for name, text in member_rows(run)),
        ("below their due", _text(shares_row(run))),
        ("refused", _text(policy_row(run))),
        ("best", _text(best_of(run))),
        ("target", _text(target.text() if target else "")),
        *((name, _text(text)) for name, text in health_rows(run)),
        ("bytes", f"{units.size(run.bytes_down)} down, {units.size(run.bytes_up)} up"),
        ("created", units.moment(run.created)),
        ("ended", units.moment(run.ended)),
    ]
    for name, value in rows:
        if str(value) not in ("", NOTHING):
            grid.add_row(name, value)
    return grid


def best_of(run: admin_pb2.RunStatus) -> str:
    """The best round by the run's metric, and the lowest loss."""
    best = f"{metric_of(run, run.best)} in round {run.best.round}" if run.HasField("best") else ""
    return ", ".join(filter(None, (best, lowest_loss(run))))


def clients_table(clients: Sequence[admin_pb2.ClientStatus]) -> RenderableType:
    """A row for each client."""
    table = FittedTable(
        ("Client", "State", "Device", "Tasks", "Run", ">Counted", ">Refused", "Last seen", "Labels", "Note"),
        optional=("Labels", "Device", "Last seen", "Tasks", "Run", "Note", "Refused", "Counted"),
        wraps=("State", "Note"),
    )
    for client in clients:
        table.add_row(
            _text(client.client_id), _state(client_state(client)), _text(client.device.name or client.device.kind),
            _text(", ".join(f"{offer.name} ({offer.train_examples:,})" for offer in client.tasks)),
            _text(client.run_id or NOTHING), f"{client.updates_counted:,}", f"{client.updates_refused:,}",
            units.moment(client.last_seen),
            _text(client_labels(client, {True: "", False: "?"})),
            _text(client.quarantine.reason or _why_unavailable(client) or client.note),
        )  # fmt: skip
    return table if clients else Text("no clients yet: `fl-client --config client.toml` starts one")


def _why_unavailable(client: admin_pb2.ClientStatus) -> str:
    """Why the client may not train, as its daemon reported it."""
    return "" if client.availability.may_train else client.availability.detail


def history_table(entries: Sequence[admin_pb2.HistoryEntry]) -> RenderableType:
    """State changes, oldest first."""
    table = FittedTable(("When", "Who", "What", "Why"), optional=("Who",), wraps=("Why",))
    for entry in entries:
        table.add_row(units.moment(entry.time), _text(entry.actor), _text(entry.event), _text(entry.detail))
    return table if entries else Text("nothing has happened yet")


def audit_table(entries: Sequence[admin_pb2.AuditEntry]) -> RenderableType:
    """Rows of the audit log, oldest first."""
    table = FittedTable(
        (">Row", "When", "Who", "From", "What", "Subject", "Result", "Detail"),
        optional=("From", "Subject"),
        wraps=("Detail",),
    )
    for entry in entries:
        table.add_row(
            str(entry.number), units.moment(entry.time), _text(entry.actor), _text(entry.address), _text(entry.method),
            _text(entry.subject or NOTHING), _text(entry.result), _text(entry.detail),
        )  # fmt: skip
    return table if entries else Text("no rows")


def _text(value: str) -> Text:
    """Text from other machines: markup and control characters have no effect."""
    return Text(units.plain(value))


def _state(name: str) -> Text:
    return Text(name, style=_STATE_STYLES.get(name.partition(",")[0], ""))


def metric_of(run: admin_pb2.RunStatus, summary: admin_pb2.RoundSummary) -> str:
    """A round's value of the metric that selects the best round."""
    metric = criterion_of(run.spec.stop).metric
    if metric not in summary.metrics:
        return NOTHING
    value = summary.metrics[metric]
    return units.percent(value) if units.is_accuracy(metric) else f"{metric} {value:.4g}"


def tokens_table(tokens: Sequence[admin_pb2.EnrollmentToken]) -> RenderableType:
    """A row for each enrollment token."""
    table = FittedTable(
        ("Token", "Name", "State", ">Uses left", "Expires", "Created", "By", "Labels"),
        optional=("Labels", "By", "Created"),
    )
    for token in tokens:
        spec = token.spec
        table.add_row(
            _text(token.id), _text(spec.name or f"{spec.name_prefix}*"), _text(token.state), str(token.uses_left),
            units.moment(token.expires), units.moment(token.created), _text(token.actor), _text(_labels(spec.labels)),
        )  # fmt: skip
    return table if tokens else Text("no tokens: `fl enroll create` makes one")


def certificates_table(certificates: Sequence[admin_pb2.CertificateStatus]) -> RenderableType:
    """A row for each certificate."""
    table = FittedTable(
        ("Name", "Serial", "Ends", "Issued", "Revoked", "Why", "Key"), optional=("Key", "Issued", "Why", "Revoked")
    )
    for each in certificates:
        table.add_row(
            _text(each.name or NOTHING), _text(each.serial or NOTHING), units.moment(each.not_after),
            units.moment(each.issued), units.moment(each.revoked), _text(each.reason), _text(each.key or NOTHING),
        )  # fmt: skip
    return table if certificates else Text("no certificates: devices get them with tokens of `fl enroll create`")


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))
