"""The command `fl`: all sub-commands in one program."""

from __future__ import annotations

import platform
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fl_common import units
from fl_common.command_help import Group, examples
from fl_common.program import version_text
from fl_ops.commands.access import audit, ca, enrollment
from fl_ops.commands.coordinator import clients, runs
from fl_ops.commands.coordinator.export import export
from fl_ops.commands.coordinator.top import top
from fl_ops.commands.coordinator.tracking import track
from fl_ops.commands.coordinator.web import web
from fl_ops.commands.local import task
from fl_ops.commands.local.compare import compare
from fl_ops.commands.local.demo import demo
from fl_ops.commands.local.landscape import landscape
from fl_ops.commands.local.methods import methods
from fl_ops.commands.local.new import new
from fl_ops.commands.local.partition import partition
from fl_ops.commands.local.privacy import privacy
from fl_ops.commands.local.simulate import simulate
from fl_ops.commands.options import Context, admin_command, command
from fl_ops.environment import package_version
from fl_ops.render import output
from protos.fl.v1 import admin_pb2
from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN

_SOURCES = {
    "certificate": "your certificate",
    "token": "your token (OIDC)",
    "none": "none: this coordinator asks operators for no identity",
}


@admin_command
def whoami(context: Context) -> None:
    """Show your identity, your roles and the calls that they allow."""
    with context.connect() as client:
        identity = client.access.who_am_i()
    output.show(identity, lambda: _table(identity), context.as_json)


def _table(identity: admin_pb2.WhoAmIResponse) -> Table:
    grid = Table.grid(padding=(0, 2))
    rows = {
        "identity": identity.identity,
        "roles": ", ".join(identity.roles),
        "source": _SOURCES.get(identity.source, identity.source),
        "until": units.moment(identity.ends) if identity.HasField("ends") else "",
        "calls": ", ".join(identity.methods),
    }
    for name, value in rows.items():
        if value:
            grid.add_row(name, Text(units.plain(value)))
    return grid


_EPILOG = (
    "Exit codes: 0 done; 1 refused or failed; 2 wrong command line, configuration or value; 3 no coordinator reached; "
    "4 not allowed; 5 no such run, client or round; 6, 7 the watched run was stopped, failed; "
    "8 time was up and work is left; 130 Ctrl-C."
    "\n\nEvery command has --json: protobuf's JSON with the fields' own names (64-bit numbers are strings), lists as "
    "arrays, a watched run as one object per line. Errors are text on stderr."
)


class Commands(Group):
    """The commands of `fl`, in the order of their help: what an operator needs every day comes first."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        names = super().list_commands(ctx)
        first = [name for name in _FIRST if name in names]
        return [*first, *(name for name in names if name not in first)]


_FIRST = ("run", "clients", "top", "web", "export", "demo", "new", "simulate", "enroll")

app = typer.Typer(
    name="fl",
    cls=Commands,
    no_args_is_help=True,
    epilog=_EPILOG,
    help="Operate a federated learning coordinator: runs, clients, models and certificates.",
    pretty_exceptions_enable=False,
)
app.add_typer(runs.app, name="run")
app.add_typer(clients.app, name="clients")
app.add_typer(task.app, name="task")
app.add_typer(enrollment.app, name="enroll")
app.add_typer(enrollment.certificates_app, name="certificates")
app.add_typer(ca.app, name="ca")
app.add_typer(audit.app, name="audit")
app.command(**examples("fl compare table.toml --processes 4", "fl compare table.toml --no-run"))(compare)
app.command(**examples("fl demo", "fl demo --rounds 10 --algorithm fedavg --algorithm scaffold"))(demo)
app.command(
    **examples(
        "fl export digits-1 --round best --out best.safetensors",
        "fl export tuned --format adapter --config run.toml --out adapter",
    )
)(export)
app.command(
    **examples(
        "fl landscape results/seed-0 config.toml --out flatness",
        "fl landscape fedavg.safetensors fedsam.safetensors config.toml --two --out flatness",
    )
)(landscape)
app.command(**examples("fl methods", "fl methods fedcm", "fl methods my_methods:sign_momentum --json"))(methods)
app.command(**examples("fl new my_task --template tabular"))(new)
app.command(**examples("fl partition digits --clients 8 --out parts.json --alpha 0.1"))(partition)
app.command(**examples("fl privacy run.toml"))(privacy)
app.command(
    **examples(
        "fl simulate config.toml --seeds 0,1,2 --processes 3 --out results",
        "fl simulate config.toml --replay digits-1 --state-dir /var/lib/impetus-server",
    )
)(simulate)
app.command(**examples("fl top"))(top)
app.command(
    **examples(
        "fl track digits-1 --tensorboard runs",
        "fl track digits-1 --mlflow http://127.0.0.1:5000 --once",
    )
)(track)
app.command(**examples("fl web", "fl web --listen 127.0.0.1:8000", "fl web open --server coordinator.example:7071"))(
    web
)
app.command(**examples("fl whoami"))(whoami)


def _version(wanted: bool) -> None:
    if wanted:
        print(version_text((PROTOCOL_MIN, PROTOCOL_MAX)))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version  # handled by its callback


@app.command("version", **examples("fl version --json"))
@command
def show_version(context: Context) -> None:
    """Show the versions of this command, of the protocol and of Python."""
    impetus = package_version("impetus-fl")
    facts = {"impetus": impetus, "protocol": [PROTOCOL_MIN, PROTOCOL_MAX], "python": platform.python_version()}
    output.show(facts, version_text((PROTOCOL_MIN, PROTOCOL_MAX)), context.as_json)
