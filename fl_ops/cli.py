"""The command `fl`: its sub-commands put together, and what they have in common told once."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from fl_ops import ca_commands, clients, output, runs
from fl_ops.compare.command import compare
from fl_ops.demo.command import demo
from fl_ops.export import export
from fl_ops.options import Context, command
from fl_ops.partition import partition
from fl_ops.simulate.command import simulate
from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN

_EPILOG = (
    "Exit codes: 0 done; 1 refused or failed; 2 wrong command line, configuration or value; 3 no coordinator reached; "
    "4 not allowed; 5 no such run, client or round; 6, 7 the watched run was stopped, failed; 130 Ctrl-C."
    "\n\nEvery command takes --json: protobuf's JSON with the fields' own names (64-bit numbers are strings), lists as "
    "arrays, watching as one object a line; errors are text on stderr."
)

app = typer.Typer(
    name="fl",
    no_args_is_help=True,
    epilog=_EPILOG,
    help="Operate a federated learning coordinator: runs, clients, models and certificates.",
    pretty_exceptions_enable=False,
)
app.add_typer(runs.app, name="run")
app.add_typer(clients.app, name="clients")
app.add_typer(ca_commands.app, name="ca")
app.command()(compare)
app.command()(demo)
app.command()(export)
app.command()(partition)
app.command()(simulate)


@app.command("version")
@command
def show_version(context: Context) -> None:
    """Show the versions of this command, of the protocol and of Python."""
    facts = {"impetus": _installed(), "protocol": [PROTOCOL_MIN, PROTOCOL_MAX], "python": platform.python_version()}
    words = f"impetus {facts['impetus']}, protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}, Python {facts['python']}"
    output.show(facts, words, context.as_json)


def _installed() -> str:
    try:
        return version("impetus-fl")
    except PackageNotFoundError:
        return "not installed"
