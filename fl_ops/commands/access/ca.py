"""`fl ca`: a small certificate authority on the command line."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fl_common.command_help import Group, examples
from fl_common.units import counted
from fl_ops.admin import settings
from fl_ops.commands.options import Context, admin_command, command
from fl_ops.render import tables
from protos.fl.v1 import admin_pb2

if TYPE_CHECKING:
    from fl_ops.certificates.pki import LeafRequest

app = typer.Typer(
    cls=Group, no_args_is_help=True, help="Make certificates for a site that has no authority of its own."
)
issue_app = typer.Typer(
    cls=Group, no_args_is_help=True, help="Issue a certificate to a server, a worker, a client or an operator."
)
app.add_typer(issue_app, name="issue")

Dir = Annotated[Path, typer.Option("--dir", metavar="DIR", help="Folder of the authority and its certificates.")]
Days = Annotated[int, typer.Option(min=1, max=36_500, help="Validity in days.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an older certificate and key: renewal.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="1 to 64 letters, digits, dots, dashes, underscores.")]


@app.command(**examples("fl ca init --name 'Clinic CA'", "fl ca init --host fl.example.org --admin alice"))
@command
def init(
    context: Context,
    directory: Dir = Path("pki"),
    name: Annotated[str, typer.Option(help="Name of the issuer, shown in certificates.")] = "Impetus CA",
    days: Days = 3_650,
    host: Annotated[
        list[str] | None, typer.Option(help="Also issue a coordinator's certificate for this name or address; repeat.")
    ] = None,
    admin: Annotated[str, typer.Option(help="Also issue a certificate to this admin. Empty: none.")] = "",
) -> None:
    """Make an authority: ca.key, which stays here, and ca.crt, which every machine needs."""
    # Imported in each command: the cryptography library takes as long to load as the rest of `fl`.
    from fl_ops.certificates import pki

    issued = pki.init(directory, name, days)
    leaves = [pki.LeafRequest(directory, "server", "coordinator", 90, force=False, hosts=tuple(host))] if host else []
    leaves += [pki.LeafRequest(directory, "admin", admin, 90, force=False)] if admin else []
    made = {leaf.role: pki.issue(leaf) for leaf in leaves}
    advice = "" if host else f"next: `fl ca issue server --dir {directory} --host HOST`; "
    advice += f"keep {issued.pair.key} secret and off the devices"
    hint = "\n".join([*(certificate.text("") for certificate in made.values()), advice])
    facts = issued.facts() | {role: certificate.facts() for role, certificate in made.items()}
    context.show(facts, issued.text(hint))


@app.command("limited", **examples("fl ca limited client", "fl ca limited server", "fl ca limited worker"))
@command
def limited(
    context: Context,
    role: Annotated[Literal["client", "server", "worker"], typer.Argument(help="The only role of its certificates.")],
    directory: Dir = Path("pki"),
    days: Days = 3_650,
) -> None:
    """Make an authority that can sign devices, coordinators or workers only, for a machine that signs by itself.

    Its key cannot make an operator: ca.key stays away from that machine.
    """
    from fl_ops.certificates import pki

    issued = pki.init_for_role(directory, role, days)
    trusted = f"the coordinator trusts {directory / pki.CLIENT_BUNDLE} (tls.client_ca)"
    hint = {
        "client": f"{trusted} and signs with these (enrollment.ca_cert, ca_key); enrollment.server_ca is the authority "
        "of its own certificate",
        "worker": f"{trusted}; workers show a certificate of this authority to it (worker_tls)",
        "server": f"devices and operators check the coordinator with {issued.pair.certificate}",
    }[role]
    context.show(issued.facts(), issued.text(hint))


@issue_app.command(
    **examples(
        "fl ca issue server --host fl.example.org --host 192.0.2.10",
        "fl ca issue server --service fl-server.impetus --host fl.example.org",
    )
)
@command
def server(
    context: Context,
    host: Annotated[
        list[str] | None, typer.Option(help="DNS name or IP address of the server; repeat for more.")
    ] = None,
    service: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME.NAMESPACE",
            help="All names of a Service in Kubernetes, and localhost for `kubectl port-forward`; repeat for more.",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the server in logs.")] = "coordinator",
    directory: Dir = Path("pki"),
    days: Days = 90,
    force: Force = False,
) -> None:
    """Issue a coordinator's certificate."""
    from fl_ops.certificates import pki

    hosts = pki.server_hosts(host or (), service or ())
    request = pki.LeafRequest(directory, "server", name, days, force, hosts)
    _issue_for_hosts(context, request, "in server.toml, with the paths that the files have on the server")


@issue_app.command(**examples("fl ca issue worker worker-1 --host fl.example.org"))
@command
def worker(
    context: Context,
    name: Name,
    host: Annotated[list[str] | None, typer.Option(help="DNS name or IP address that devices dial; repeat.")] = None,
    service: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME.NAMESPACE", help="All names of a Service in Kubernetes; repeat for more."),
    ] = None,
    directory: Dir = Path("pki"),
    days: Days = 90,
    force: Force = False,
) -> None:
    """Issue the certificate of a worker, which ends clients' streams for the coordinator (`fl-server --role data`)."""
    from fl_ops.certificates import pki

    hosts = pki.server_hosts(host or (), service or ())
    request = pki.LeafRequest(directory, "worker", name, days, force, hosts)
    place = "in a file that the worker reads after the coordinator's settings, with the paths there"
    _issue_for_hosts(context, request, place)


def _issue_for_hosts(context: Context, request: LeafRequest, place: str) -> None:
    """place: where the section of the settings belongs."""
    from fl_ops.certificates import pki

    issued = pki.issue(request)
    pair = issued.pair
    section = _section("tls", cert=pair.certificate, key=pair.key, client_ca=pair.authority)
    context.show(issued.facts(), issued.text(f"{place}:\n\n{section}"))


@issue_app.command(**examples("fl ca issue client edge-3"))
@command
def client(context: Context, name: Name, directory: Dir = Path("pki"), days: Days = 90, force: Force = False) -> None:
    """Issue a device's certificate; its daemon can only register under this name."""
    from fl_ops.certificates import pki

    issued = pki.issue(pki.LeafRequest(directory, "client", name, days, force))
    pair = issued.pair
    section = _section("tls", ca=pair.authority, cert=pair.certificate, key=pair.key)
    hint = (
        f"copy these two and {pair.authority} to the device; in its client.toml, with the paths that they have there:"
        f"\n\n{section}"
    )
    context.show(issued.facts(), issued.text(hint))


@issue_app.command(**examples("fl ca issue viewer dashboard"))
@command
def viewer(context: Context, name: Name, directory: Dir = Path("pki"), days: Days = 90, force: Force = False) -> None:
    """Issue a certificate that reads runs, clients and history, and changes nothing."""
    _issue_operator(context, "viewer", name, directory, days, force)


@issue_app.command(**examples("fl ca issue operator bob"))
@command
def operator(context: Context, name: Name, directory: Dir = Path("pki"), days: Days = 90, force: Force = False) -> None:
    """Issue a certificate for runs: the operator's own, and those without an owner."""
    _issue_operator(context, "operator", name, directory, days, force)


@issue_app.command(**examples("fl ca issue enroller provisioning"))
@command
def enroller(context: Context, name: Name, directory: Dir = Path("pki"), days: Days = 90, force: Force = False) -> None:
    """Issue a certificate that makes tokens for devices, and nothing else."""
    _issue_operator(context, "enroller", name, directory, days, force)


@issue_app.command(**examples("fl ca issue admin alice"))
@command
def admin(context: Context, name: Name, directory: Dir = Path("pki"), days: Days = 90, force: Force = False) -> None:
    """Issue a certificate that may do everything with this command."""
    _issue_operator(context, "admin", name, directory, days, force)


def _issue_operator(context: Context, role: str, name: str, directory: Path, days: int, force: bool) -> None:
    from fl_ops.certificates import pki

    issued = pki.issue(pki.LeafRequest(directory, role, name, days, force))
    pair = issued.pair
    files = {"ca": pair.authority, "cert": pair.certificate, "key": pair.key}
    flags = " ".join(f"--{name} {shlex.quote(str(path))}" for name, path in files.items())
    section = _section("", **files)
    hint = f"fl whoami {flags}\n\nwithout these options, in {settings.file_path(os.environ)}:\n\n{section}"
    context.show(issued.facts(), issued.text(hint))


@app.command(**examples("fl ca renew --within 30", "fl ca renew client-edge-3"))
@command
def renew(
    context: Context,
    holder: Annotated[list[str] | None, typer.Argument(help="client-edge-3, server-coordinator; none: all.")] = None,
    directory: Dir = Path("pki"),
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Folder of the old certificates, to move to a new authority."),
    ] = None,
    within: Annotated[int | None, typer.Option(min=1, help="Only certificates that end within so many days.")] = None,
    days: Days = 90,
) -> None:
    """Issue new certificates and keys with the same roles, names and hosts.

    Running coordinators and daemons load new files by themselves.
    """
    from fl_ops.certificates import pki

    renewed = pki.renew(directory, days, source=source, holders=holder or (), within=within)
    lines = [
        f"made {certificate.pair.certificate} and {certificate.pair.key}, until {certificate.not_after[:10]}"
        for certificate in renewed
    ]
    text = "\n".join(lines) or f"no certificate ends within {counted(within or 0, 'day')}"
    context.show({"renewed": [certificate.facts() for certificate in renewed]}, text)


@app.command(**examples("fl ca status", "fl ca status --json"))
@admin_command
def status(context: Context) -> None:
    """Show the authorities that the coordinator knows, and how many devices depend on each."""
    known = context.call(admin_pb2.ListAuthoritiesRequest(), admin_pb2.ListAuthoritiesResponse)
    context.show(known, lambda: tables.authorities_table(known))


@app.command(**examples("fl ca rotate", "fl ca rotate --finish", "fl ca rotate client --dir pki"))
@admin_command
def rotate(
    context: Context,
    role: Annotated[
        Literal["client", "worker"] | None,
        typer.Argument(help="The authority of `fl ca limited ROLE`. None: the first one."),
    ] = None,
    directory: Dir = Path("pki"),
    finish: Annotated[bool, typer.Option("--finish", help="Drop the old authority, the last step.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Do not ask the coordinator. Devices that are not ready need a new token.")
    ] = False,
    days: Days = 3_650,
) -> None:
    """Replace an authority and its key, without enrolling devices again: run it, run it again, then with --finish.

    First both authorities are trusted, then the new one signs, then the old one is dropped. A step is refused while
    devices are not ready for it, with their number. `fl ca status` has the numbers.
    """
    from fl_ops.commands.access.ca_rotation import Changing

    text, facts = Changing(context, directory, role or "", days, force=force).step(finish=finish)
    context.show(facts, text)


def _section(name: str, **files: Path) -> str:
    """A section of a settings file in TOML; without a name, the keys alone. Its paths hold in every folder."""
    lines = [f"{key} = {json.dumps(str(path.resolve()), ensure_ascii=False)}" for key, path in files.items()]
    return "\n".join([f"[{name}]", *lines] if name else lines)
