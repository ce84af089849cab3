"""One client as names and values with its latest history: what `fl clients show` prints."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fl_ops import units
from fl_ops.states import client_state
from fl_ops.tables import history_table
from fl_ops.units import NOTHING
from protos.fl.v1 import admin_pb2

_UNKNOWN = "an unknown address"


def client_page(details: admin_pb2.GetClientResponse) -> RenderableType:
    """What is known of one client; what is not known is left out."""
    client = details.client
    memory = f", {units.size(client.device.memory_bytes)}" if client.device.memory_bytes else ""
    rows: list[tuple[str, str]] = [
        ("client", client.client_id),
        ("state", client_state(client)),
        ("why", client.availability.detail if not client.availability.may_train else ""),
        ("note", client.note),
        ("works on", details.work),
        *_daemons(details),
        ("standing", _standing(details)),
        ("updates", f"{client.updates_counted:,} counted, {client.updates_refused:,} refused"),
        ("tasks", ", ".join(f"{offer.name} ({offer.train_examples:,} examples)" for offer in client.tasks)),
        ("labels", " ".join(f"{key}={client.labels[key]}" for key in sorted(client.labels))),
        ("device", f"{client.device.name or client.device.kind}{memory}"),
        ("software", client.software),
        ("last seen", units.moment(client.last_seen)),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        if value not in ("", NOTHING):
            grid.add_row(name, Text(units.plain(value)))
    return Group(grid, Text(), history_table(details.history))


def _daemons(details: admin_pb2.GetClientResponse) -> list[tuple[str, str]]:
    """Who speaks for the client, and who else wanted to."""
    rows = [("session", f"{_place(details.session)}, since {units.moment(details.session.registered)}")]
    rows.append(("certificate", _certificate(details.session)))
    if not details.HasField("session"):
        rows = [("session", "none")]
    if details.HasField("refused"):
        told = f"{_place(details.refused)}, last on {units.moment(details.refused.registered)}"
        rows += [("refused", told), ("its certificate", _certificate(details.refused))]
    if details.HasField("fenced"):
        rows.append(("replaced", f"{_place(details.fenced)}, there since {units.moment(details.fenced.registered)}"))
    if details.contested:
        rows.append(("two daemons", f"met {details.conflicts} times and go on: end one of them"))
    elif details.conflicts:
        rows.append(("two daemons", f"met {details.conflicts} times"))
    return rows


def _place(origin: admin_pb2.ClientOrigin) -> str:
    return f"{origin.address or _UNKNOWN}, process {origin.instance_id or 'unknown'}"


def _certificate(origin: admin_pb2.ClientOrigin) -> str:
    if not origin.certificate_serial:
        return ""
    ended = datetime.fromtimestamp(origin.certificate_end.seconds, UTC) <= datetime.now(UTC)
    word = "ended" if ended else "ends"
    return f"serial {origin.certificate_serial}, {word} on {units.moment(origin.certificate_end)}"


def _standing(details: admin_pb2.GetClientResponse) -> str:
    """What stands against it, whether or not it is quarantined for it."""
    if not details.HasField("standing"):
        return ""
    return details.standing.reason
