"""`fl ca`: the command lines of a small certificate authority; what they do is in `ca_files.py`.

That module is imported when a command runs: the library that makes certificates takes as long as the rest of `fl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fl_ops.options import Context, command

app = typer.Typer(no_args_is_help=True, help="Make certificates for a site that has no authority of its own.")
issue_app = typer.Typer(no_args_is_help=True, help="Issue a certificate to a server, a client or an admin.")
app.add_typer(issue_app, name="issue")

Dir = Annotated[Path, typer.Option("--dir", metavar="DIR", help="Folder of the authority and of what it issues.")]
Days = Annotated[int, typer.Option(min=1, max=36_500, help="How long it is valid.")]
Force = Annotated[bool, typer.Option("--force", help="Write over an older certificate and key: renewal.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="1 to 64 letters, digits, dots, dashes, underscores.")]


@app.command()
@command
def init(
    context: Context,
    directory: Dir = Path("pki"),
    name: Annotated[str, typer.Option(help="What people see as the issuer.")] = "Impetus CA",
    days: Days = 3_650,
) -> None:
    """Make an authority: ca.key, which stays here, and ca.crt, which everybody gets."""
    from fl_ops import ca_files

    ca_files.init(context, directory, name, days)


@issue_app.command()
@command
def server(
    context: Context,
    host: Annotated[list[str], typer.Option(help="DNS name or IP address at which it is reached; repeat for more.")],
    name: Annotated[str, typer.Option(help="What the server is called in logs.")] = "coordinator",
    directory: Dir = Path("pki"),
    days: Days = 90,
    force: Force = False,
) -> None:
    """Issue a coordinator's certificate."""
    from fl_ops import ca_files

    order = ca_files.Order(directory, "server", name, days, force, tuple(host))
    pair = order.pair
    ca_files.issue(
        context, order, f"in server.toml: cert = {pair.certificate}, key = {pair.key}, ca = {pair.authority}"
    )


@issue_app.command()
@command
def client(context: Context, name: Name, directory: Dir = Path("pki"), days: Days = 90, force: Force = False) -> None:
    """Issue a device's certificate; its daemon can only register by this name."""
    from fl_ops import ca_files

    order = ca_files.Order(directory, "client", name, days, force)
    pair = order.pair
    hint = f"copy {pair.certificate}, {pair.key} and {pair.authority} to the device and name them in its client.toml"
    ca_files.issue(context, order, hint)


@issue_app.command()
@command
def admin(context: Context, name: Name, directory: Dir = Path("pki"), days: Days = 90, force: Force = False) -> None:
    """Issue an operator's certificate for this command."""
    from fl_ops import ca_files

    order = ca_files.Order(directory, "admin", name, days, force)
    pair = order.pair
    ca_files.issue(context, order, f"fl run list --ca {pair.authority} --cert {pair.certificate} --key {pair.key}")


@app.command()
@command
def renew(
    context: Context,
    holder: Annotated[list[str] | None, typer.Argument(help="client-edge-3, server-coordinator; none: all.")] = None,
    directory: Dir = Path("pki"),
    source: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Folder of the old ones, if another: a new authority.")
    ] = None,
    within: Annotated[int | None, typer.Option(min=1, help="Only those that end in so many days.")] = None,
    days: Days = 90,
) -> None:
    """Issue new certificates and keys to whoever has one, with the same roles, names and hosts.

    Running coordinators and daemons take up what lies in their files.
    """
    from fl_ops import ca_files

    ca_files.renew(context, directory, ca_files.Renewal(source or directory, tuple(holder or ()), within, days))
