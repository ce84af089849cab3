"""Messages of the Admin service as tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fl_common import units
from fl_common.units import NOTHING
from fl_ops.render.fitted import Cell, FittedTable
from fl_ops.render.rounds import (
    TargetCost,
    cohort_table,
    local_epochs_table,
    phases_text,
    round_details_table,
    rounds_table,
)
from fl_ops.render.text import fact_grid, plain, state, told
from fl_web.facts import client as client_facts
from fl_web.facts import client_work
from fl_web.facts import run as run_facts
from fl_web.facts.rounds import rounds_of, shown_metric
from fl_web.facts.words import Fact, event_detail, fact, run_state
from protos.fl.v1 import admin_pb2


def runs_table(runs: Sequence[admin_pb2.RunStatus]) -> RenderableType:
    """A row for each run. There is a column of owners if a run has one."""
    if not runs:
        return Text("no runs yet: `fl run create config.toml` makes one")
    left_out = () if any(run.spec.owner for run in runs) else ("Owner",)
    columns = {name: cell for name, cell in RUN_COLUMNS.items() if name not in left_out}
    optional = [name for name in _RUN_OPTIONAL if name not in left_out]
    table = FittedTable.of(runs, columns, optional=optional)
    return Group(table, *(plain(line) for run in runs if (line := _below(run))))


RUN_COLUMNS: dict[str, Callable[[admin_pb2.RunStatus], Cell]] = {
    "Run": lambda run: plain(run.run_id),
    "State": lambda run: state(run_state(run.state)),
    "Task": lambda run: plain(run.spec.task.name),
    "Algorithm": lambda run: plain(run.spec.algorithm.name),
    "Owner": lambda run: plain(run.spec.owner or NOTHING),
    ">Rounds": run_facts.rounds_text,
    ">Best": lambda run: plain(run_facts.value_of(run, run.best.metrics)),
    "Now": lambda run: plain(run_facts.current(run)),
    ">Down": lambda run: NOTHING if run.cohorts_hidden else units.size(run.bytes_down),
    ">Up": lambda run: NOTHING if run.cohorts_hidden else units.size(run.bytes_up),
    "Created": lambda run: units.moment(run.created),
}
_RUN_OPTIONAL = ("Up", "Down", "Created", "Owner", "Task", "Algorithm", "Now")


def _below(run: admin_pb2.RunStatus) -> str:
    """A line below the list of runs, for a run that is not loaded or that waits."""
    if run.state == admin_pb2.RUN_STATE_UNSPECIFIED:
        return f"{run.run_id}: {run.reason}"
    return f"{run.run_id}: {run_facts.waits(run)}" if run.waiting_for else ""


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
    rows = rounds_of(response.rounds)
    more: list[RenderableType] = [Text(), round_details_table(rows)] if details else []
    if details and any(summary.local_epochs for summary in response.rounds):
        more += [Text(), local_epochs_table(response.rounds)]
    rounds = rounds_table(rows, shown_metric(response.run))
    clients: list[RenderableType] = [] if cohort is None else [Text(), phases_text(cohort), cohort_table(cohort)]
    return Group(run_summary(response.run, target), *clients, Text(), rounds, *more)


def run_summary(run: admin_pb2.RunStatus, target: TargetCost | None = None) -> RenderableType:
    """One run as names and values."""
    rows: list[tuple[str, Text] | Fact] = [
        ("run", plain(run.run_id)),
        ("state", state(run_state(run.state))),
        *run_facts.outline(run),
        *run_facts.under_way(run),
        *run_facts.attention(run),
        fact("best", run_facts.best(run)),
        fact("target", target.text() if target else ""),
        fact("last commit", _last_commit(run, time.time())),
        *run_facts.figures(run),
        fact("bytes", _moved(run)),
        fact("created", run.created),
        fact("ended", run.ended),
    ]
    return fact_grid(rows)


def _moved(run: admin_pb2.RunStatus) -> str:
    if run.cohorts_hidden:
        return ""
    return f"{units.size(run.bytes_down)} down, {units.size(run.bytes_up)} up"


def _last_commit(run: admin_pb2.RunStatus, now: float) -> str:
    if not run.HasField("latest"):
        return ""
    text = f"round {run.latest.round}, {units.moment(run.latest.committed)}"
    if run.HasField("ended"):
        return text
    return f"{text}, {units.duration(max(0.0, now - run.latest.committed.ToNanoseconds() / 1e9))} ago"


CLIENT_COLUMNS: dict[str, Callable[[admin_pb2.ClientStatus], Cell]] = {
    "Client": lambda client: plain(client.client_id),
    "State": lambda client: state(client_facts.words(client), told(client_facts.state(client))),
    "Device": lambda client: plain(client.device.name or client.device.kind),
    "Version": lambda client: plain(client.software.removeprefix("impetus ") or NOTHING),
    "Tasks": lambda client: plain(
        ", ".join(f"{client_facts.offer_title(offer)} ({offer.train_examples:,})" for offer in client.tasks)
    ),
    "Run": lambda client: plain(client.run_id or NOTHING),
    ">Counted": lambda client: units.count(client.updates_counted),
    ">Refused": lambda client: units.count(client.work.refused),
    ">Failed": lambda client: client_work.failed(client.work),
    ">Work": lambda client: client_work.work_seconds(client.work),
    ">Transfer": lambda client: client_work.transfer_seconds(client.work),
    ">Came last": lambda client: client_work.came_last(client.work),
    ">Epsilon": lambda client: client_work.epsilon(client.work),
    "Last seen": lambda client: units.moment(client.last_seen),
    "Labels": lambda client: plain(
        " ".join(f"{name}={of}{'' if own else '?'}" for name, of, own in client_facts.label_texts(client))
    ),
    "Note": lambda client: plain(client_facts.note(client)),
}
_CLIENT_OPTIONAL = (
    "Labels", "Device", "Version", "Last seen", "Tasks", "Run", "Transfer", "Came last", "Epsilon", "Work", "Refused",
    "Counted", "Note", "Failed",
)  # fmt: skip
"""Columns that a narrow terminal leaves out, the first of them first."""


def clients_table(clients: Sequence[admin_pb2.ClientStatus]) -> RenderableType:
    """A row for each client. Epsilon has a column if a client states one, the version if not all have the same."""
    stated = any(client.work.HasField("epsilon") for client in clients)
    differ = len({client.software for client in clients}) > 1
    left_out = {name for name, shown in (("Epsilon", stated), ("Version", differ)) if not shown}
    columns = {name: cell for name, cell in CLIENT_COLUMNS.items() if name.lstrip(">") not in left_out}
    optional = [name for name in _CLIENT_OPTIONAL if name not in left_out]
    table = FittedTable.of(clients, columns, optional=optional, wraps=("State", "Note"))
    return table if clients else Text("no clients yet: `fl-client --config client.toml` starts one")


def client_details(details: admin_pb2.GetClientResponse) -> RenderableType:
    """All known facts on one client with its latest history; unknown facts are left out."""
    client = details.client
    labels = [f"{name}={of} ({'enrolled' if own else 'claimed'})" for name, of, own in client_facts.label_texts(client)]
    rows: list[tuple[str, Text] | Fact] = [
        ("client", plain(client.client_id)),
        ("state", state(client_facts.words(client), told(client_facts.state(client)))),
        *client_facts.facts(details),
        fact("updates", f"{client.updates_counted:,} counted, {client.work.refused:,} refused"),
        fact("labels", " ".join(labels)),
        fact("last seen", client.last_seen),
    ]
    return Group(fact_grid(rows), Text(), history_table(details.history))


def history_table(entries: Sequence[admin_pb2.HistoryEntry]) -> RenderableType:
    """State changes, oldest first."""
    columns: dict[str, Callable[[admin_pb2.HistoryEntry], Cell]] = {
        "When": lambda entry: units.moment(entry.time),
        "Who": lambda entry: plain(entry.actor),
        "What": lambda entry: plain(entry.event),
        "Why": lambda entry: plain(event_detail(entry.event, entry.detail)),
    }
    table = FittedTable.of(entries, columns, optional=("Who",), wraps=("Why",))
    return table if entries else Text("nothing has happened yet")


def audit_table(entries: Sequence[admin_pb2.AuditEntry]) -> RenderableType:
    """Rows of the audit log, oldest first."""
    columns: dict[str, Callable[[admin_pb2.AuditEntry], Cell]] = {
        ">Row": lambda entry: str(entry.number),
        "When": lambda entry: units.moment(entry.time),
        "Who": lambda entry: plain(entry.actor),
        "From": lambda entry: plain(entry.address),
        "What": lambda entry: plain(entry.method),
        "Subject": lambda entry: plain(entry.subject or NOTHING),
        "Result": lambda entry: plain(entry.result),
        "Detail": lambda entry: plain(entry.detail),
    }
    table = FittedTable.of(entries, columns, optional=("From", "Subject"), wraps=("Detail",))
    return table if entries else Text("no rows")


def tokens_table(tokens: Sequence[admin_pb2.EnrollmentToken]) -> RenderableType:
    """A row for each enrollment token."""
    table = FittedTable(
        ("Token", "Name", "State", ">Uses left", "Expires", "Created", "By", "Labels"),
        optional=("Labels", "By", "Created"),
    )
    for token in tokens:
        spec = token.spec
        table.add_row(
            plain(token.id), plain(spec.name or f"{spec.name_prefix}*"), plain(token.state), str(token.uses_left),
            units.moment(token.expires), units.moment(token.created), plain(token.actor), plain(_labels(spec.labels)),
        )  # fmt: skip
    return table if tokens else Text("no tokens: `fl enroll create` makes one")


def certificates_table(certificates: Sequence[admin_pb2.CertificateStatus]) -> RenderableType:
    """A row for each certificate."""
    table = FittedTable(
        ("Name", "Serial", "Ends", "Issued", "Revoked", "Why", "Key"), optional=("Key", "Issued", "Why", "Revoked")
    )
    for certificate in certificates:
        ends, issued, revoked = map(units.moment, (certificate.not_after, certificate.issued, certificate.revoked))
        name, serial, key = (plain(text or NOTHING) for text in (certificate.name, certificate.serial, certificate.key))
        table.add_row(name, serial, ends, issued, revoked, plain(certificate.reason), key)
    return table if certificates else Text("no certificates: devices get them with tokens of `fl enroll create`")


def authorities_table(known: admin_pb2.ListAuthoritiesResponse) -> RenderableType:
    """A row for each authority: what it does, and the devices that have its certificates, depend on it, or lack it."""
    columns = ("Authority", "SHA-256", "Ends", "Signs", ">Devices", ">Need it", ">Do not trust it")
    table = FittedTable(columns, optional=("Ends", "SHA-256"))
    for authority in known.authorities:
        does = {"devices": authority.signs, "this coordinator": authority.signed_coordinator}
        signs = ", ".join(what for what, signed in does.items() if signed)
        table.add_row(
            plain(authority.name), plain(authority.fingerprint[:16]), units.moment(authority.not_after),
            plain(signs or NOTHING), f"{authority.holders:,}", f"{authority.dependents:,}",
            f"{authority.strangers:,}" if authority.given else NOTHING,
        )  # fmt: skip
    total = units.counted(known.clients, "device")
    return Group(table, plain(f"{total} with a certificate that can be used or renewed"))


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))
