"""The output of `fl clients show`: one client as names and values, with its latest history."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fl_common import units
from fl_common.units import NOTHING
from fl_ops.render.states import client_labels, client_state, refused_runs
from fl_ops.render.tables import history_table
from protos.fl.v1 import admin_pb2, coordinator_pb2

_UNKNOWN = "an unknown address"


def client_details(details: admin_pb2.GetClientResponse) -> RenderableType:
    """All known facts on one client; unknown ones are left out."""
    client = details.client
    memory = f", {units.size(client.device.memory_bytes)}" if client.device.memory_bytes else ""
    rows: list[tuple[str, str]] = [
        ("client", client.client_id),
        ("state", client_state(client)),
        ("why", client.availability.detail if not client.availability.may_train else ""),
        ("note", client.note),
        ("works on", details.work),
        ("refuses", refused_runs(client)),
        *((f"not drawn by {one.run_id}", f"{one.why}; {one.remedy}") for one in details.not_drawn),
        *_session_rows(details),
        ("standing", details.standing.reason if details.HasField("standing") else ""),
        ("updates", f"{client.updates_counted:,} counted, {client.updates_refused:,} refused"),
        ("tasks", ", ".join(f"{offer.name} ({_amount(offer)})" for offer in client.tasks)),
        ("methods", ", ".join(offer.name for offer in client.methods)),
        ("labels", client_labels(client, {True: " (enrolled)", False: " (claimed)"})),
        ("device", f"{client.device.name or client.device.kind}{memory}"),
        ("software", client.software),
        ("last seen", units.moment(client.last_seen)),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        if value not in ("", NOTHING):
            grid.add_row(name, Text(units.plain(value)))
    return Group(grid, Text(), history_table(details.history))


def _amount(offer: coordinator_pb2.TaskOffer) -> str:
    batches = f" in {offer.train_batches:,} batches" if offer.train_batches else ""
    return f"{offer.train_examples:,} examples{batches}"


def _session_rows(details: admin_pb2.GetClientResponse) -> list[tuple[str, str]]:
    """The daemon that has the session, and others that used the same identity."""
    rows = [("session", f"{_origin(details.session)}, since {units.moment(details.session.registered)}")]
    rows.append(("certificate", _certificate(details.session)))
    if not details.HasField("session"):
        rows = [("session", "none")]
    if details.HasField("refused"):
        origin = f"{_origin(details.refused)}, last on {units.moment(details.refused.registered)}"
        rows += [("refused", origin), ("its certificate", _certificate(details.refused))]
    if details.HasField("fenced"):
        rows.append(("replaced", f"{_origin(details.fenced)}, since {units.moment(details.fenced.registered)}"))
    if details.contested:
        rows.append(("two daemons", f"used this identity {details.conflicts} times and still do: stop one of them"))
    elif details.conflicts:
        rows.append(("two daemons", f"used this identity {details.conflicts} times"))
    return rows


def _origin(origin: admin_pb2.ClientOrigin) -> str:
    return f"{origin.address or _UNKNOWN}, process {origin.instance_id or 'unknown'}"


def _certificate(origin: admin_pb2.ClientOrigin) -> str:
    if not origin.certificate_serial:
        return ""
    expired = datetime.fromtimestamp(origin.certificate_end.seconds, UTC) <= datetime.now(UTC)
    verb = "expired" if expired else "expires"
    return f"serial {origin.certificate_serial}, {verb} on {units.moment(origin.certificate_end)}"
