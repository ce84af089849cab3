"""`fl whoami`: the caller as the coordinator knows it."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from fl_common import units
from fl_ops.commands.options import Context, admin_command
from fl_ops.render import output
from protos.fl.v1 import admin_pb2

_SOURCES = {
    "certificate": "your certificate",
    "token": "your token (OIDC)",
    "none": "none: this coordinator asks operators for no identity",
}


@admin_command
def whoami(context: Context) -> None:
    """Show your identity, your roles and the calls that they allow."""
    with context.connect() as client:
        found = client.access.who_am_i()
    output.show(found, lambda: _table(found), context.as_json)


def _table(found: admin_pb2.WhoAmIResponse) -> Table:
    grid = Table.grid(padding=(0, 2))
    rows = {
        "identity": found.identity,
        "roles": ", ".join(found.roles),
        "source": _SOURCES.get(found.source, found.source),
        "until": units.moment(found.ends) if found.HasField("ends") else "",
        "calls": ", ".join(found.methods),
    }
    for name, value in rows.items():
        if value:
            grid.add_row(name, Text(units.plain(value)))
    return grid
