"""`fl whoami`: the caller's identity and roles."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from fl_common import units
from fl_ops.commands.options import Context, admin_command
from protos.fl.v1 import admin_pb2

_SOURCES = {
    "certificate": "your certificate",
    "token": "your token (OIDC)",
    "none": "none: this coordinator asks operators for no identity",
}


@admin_command
def whoami(context: Context) -> None:
    """Show your identity, your roles and the calls that they allow."""
    identity = context.call(admin_pb2.WhoAmIRequest(), admin_pb2.WhoAmIResponse)
    context.show(identity, lambda: _table(identity))


def _table(identity: admin_pb2.WhoAmIResponse) -> Table:
    grid = Table.grid(padding=(0, 2))
    rows = {
        "identity": identity.identity,
        "roles": ", ".join(identity.roles),
        "source": _SOURCES.get(identity.source, identity.source),
        "until": units.moment(identity.ends) if identity.HasField("ends") else "",
        "calls": ", ".join(identity.methods),
        "leader": _leader(identity.leadership) if identity.HasField("leadership") else "",
        "standby": "; ".join(map(_standby, identity.leadership.standbys)),
    }
    for name, value in rows.items():
        if value:
            grid.add_row(name, Text(units.plain(value)))
    return grid


def _leader(leadership: admin_pb2.Leadership) -> str:
    alone = "" if leadership.standbys else "; no standby waits"
    return f"{leadership.leader} since {units.moment(leadership.since)}, epoch {leadership.epoch}{alone}"


def _standby(standby: admin_pb2.Standby) -> str:
    behind = f"{units.size(standby.behind_bytes)} behind" if standby.behind_bytes else "has all checkpoints"
    return f"{standby.name}, {behind}"
